// The sizes that a Flight message declares, read before Arrow decodes the message.
//
// A compressed batch of 29 kB can unpack to 900 MB. Arrow allocates the declared size of each
// buffer and checks afterwards that the data has it, so the declared sizes bound the memory.
//
//   FlightData (protobuf)      field 2: header, field 1000: body
//   header (flatbuffer)        Message → RecordBatch → compression, buffers (offset, length)
//   body                       per compressed buffer: int64 size when unpacked, then the data
//
// Every read is checked against the bounds of its bytes: they come from untrusted clients.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include <arrow/api.h>

namespace polybus {

struct Span {
  const uint8_t* data = nullptr;
  int64_t size = 0;

  // Reads a little-endian value. Returns false if it is not inside.
  template <typename T>
  bool Read(int64_t at, T* value) const {
    if (at < 0 || at > size - static_cast<int64_t>(sizeof(T))) return false;
    std::memcpy(value, data + at, sizeof(T));
    return true;
  }
};

// A table of a flatbuffer: it begins with the distance back to its vtable, which has the place of
// each field in the table, 0 if the field is missing.
class FlatTable {
 public:
  static bool Root(Span span, FlatTable* table) {
    uint32_t at;
    return span.Read(0, &at) && Open(span, at, table);
  }

  // Sets `*at` to the position of a field, 0 if it is missing. Returns false if malformed.
  bool Find(int field, int64_t* at) const {
    uint16_t vtable_size, offset;
    if (!span_.Read(vtable_, &vtable_size)) return false;
    int64_t slot = 4 + 2 * field;
    *at = 0;
    if (slot + 2 > vtable_size) return true;
    if (!span_.Read(vtable_ + slot, &offset)) return false;
    if (offset != 0) *at = at_ + offset;
    return true;
  }

  template <typename T>
  bool Value(int field, T* value) const {
    int64_t at;
    if (!Find(field, &at)) return false;
    return at == 0 || span_.Read(at, value);
  }

  // Opens the table that a field refers to. Returns false if it is missing or malformed.
  bool Table(int field, FlatTable* table) const {
    int64_t at;
    uint32_t distance;
    return Find(field, &at) && at != 0 && span_.Read(at, &distance) &&
           Open(span_, at + distance, table);
  }

  // Finds a vector of structs of `width` bytes. An absent vector is empty.
  bool Structs(int field, int64_t width, Span* items) const {
    int64_t at;
    uint32_t distance, count;
    *items = Span();
    if (!Find(field, &at)) return false;
    if (at == 0) return true;
    if (!span_.Read(at, &distance) || !span_.Read(at + distance, &count)) return false;
    int64_t first = at + distance + 4;
    if (count > (span_.size - first) / width) return false;
    *items = Span{span_.data + first, count * width};
    return true;
  }

 private:
  static bool Open(Span span, int64_t at, FlatTable* table) {
    int32_t back;
    if (!span.Read(at, &back)) return false;
    table->span_ = span;
    table->at_ = at;
    table->vtable_ = at - back;
    return true;
  }

  Span span_;
  int64_t at_ = 0, vtable_ = 0;
};

// Finds header and body in the bytes of a FlightData. Returns false if malformed, and also for
// bytes that another parser could read differently: unknown fields, tags beyond 32 bits, and
// repeated fields. Arrow decodes the header that its own parser finds, so both must agree.
inline bool FindParts(Span message, Span* header, Span* body) {
  constexpr uint64_t kDescriptor = 1, kHeader = 2, kMetadata = 3, kBody = 1000;
  int64_t at = 0;
  bool has_header = false, has_body = false;
  auto varint = [&](uint64_t* value) {
    *value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      uint8_t byte;
      if (!message.Read(at++, &byte)) return false;
      *value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return true;
    }
    return false;
  };
  while (at < message.size) {
    uint64_t tag, size;
    // All fields of FlightData are strings of bytes or messages: wire type 2.
    if (!varint(&tag) || tag > UINT32_MAX || (tag & 7) != 2 || !varint(&size)) return false;
    if (size > static_cast<uint64_t>(message.size - at)) return false;
    Span field{message.data + at, static_cast<int64_t>(size)};
    switch (tag >> 3) {
      case kDescriptor:
      case kMetadata:
        break;
      case kHeader:
        if (std::exchange(has_header, true)) return false;
        *header = field;
        break;
      case kBody:
        if (std::exchange(has_body, true)) return false;
        *body = field;
        break;
      default:
        return false;
    }
    at += field.size;
  }
  return true;
}

// Returns the bytes that a message takes once it is unpacked, 0 if nothing in it is compressed.
inline arrow::Result<int64_t> UnpackedSize(Span header, Span body) {
  // Numbers of Arrow's format: Message.fbs.
  constexpr uint8_t kDictionaryBatch = 2, kRecordBatch = 3;
  constexpr int16_t kVersion4 = 3;
  const auto malformed = arrow::Status::Invalid("the header of a batch is malformed");
  FlatTable message, batch;
  uint8_t type = 0;
  int16_t version = 0;
  int64_t custom = 0, compression = 0;
  if (!FlatTable::Root(header, &message) || !message.Value(0, &version) ||
      !message.Value(1, &type) || !message.Find(4, &custom))
    return malformed;
  if (type != kRecordBatch && type != kDictionaryBatch) return 0;
  if (!message.Table(2, &batch)) return malformed;
  if (type == kDictionaryBatch) {
    FlatTable dictionary = batch;
    if (!dictionary.Table(1, &batch)) return malformed;
  }
  // Arrow 0.17 named the compression in the custom metadata of a message of version 4.
  if (version <= kVersion4 && custom != 0)
    return arrow::Status::Invalid("a batch of Arrow 0.17 or older must have no custom metadata");
  Span buffers;
  if (!batch.Find(3, &compression) || !batch.Structs(2, 16, &buffers)) return malformed;
  if (compression == 0) return 0;
  int64_t total = 0;
  for (int64_t at = 0; at < buffers.size; at += 16) {
    int64_t offset = 0, length = 0, size = 0;
    buffers.Read(at, &offset);
    buffers.Read(at + 8, &length);
    if (length == 0) continue;
    if (offset < 0 || length < 8 || length > body.size || offset > body.size - length)
      return malformed;
    body.Read(offset, &size);
    if (size == -1) size = length - 8;  // this buffer is not compressed
    if (size < 0 || size > std::numeric_limits<int64_t>::max() - total) return malformed;
    total += size;
  }
  return total;
}

}  // namespace polybus
