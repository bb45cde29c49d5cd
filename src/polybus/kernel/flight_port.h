// The Arrow Flight service of the native port, below Python: see flight_port.pyx.
//
// A stream of batches needs no Python to be read or answered. Its thread, which is gRPC's,
// reads batches and lays each on the desk; another one writes answers, in order, as they
// become ready. Whoever works at the desk (one thread of Python) takes all that lies there.
//
//   reading thread ──▶ Desk ──▶ Python, many at once ──▶ Put::Fill ──▶ answering thread
//        ▲ waits while the stream's window is full                        │ in order
//        └────────────────────────────────────────────────────────────────┘
//
// Everything else (what opens a stream, actions, reads) is called in Python directly, on
// gRPC's thread: see Hooks.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <arrow/api.h>
#include <arrow/flight/api.h>
#include <arrow/util/byte_size.h>

namespace polybus {

using arrow::Status;
using Batch = std::shared_ptr<arrow::RecordBatch>;
using Bytes = std::shared_ptr<arrow::Buffer>;
using Guard = std::unique_lock<std::mutex>;

inline double Now() {  // Python's time.monotonic()
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What a client is told instead of an answer; empty until Python has filled it.
struct Refusal {
  bool is_set = false;
  int code = 0;  // of arrow::flight::FlightStatusCode
  std::string text, extra;

  Status ToStatus() const {
    if (!is_set) return Status::OK();
    auto kind = static_cast<arrow::flight::FlightStatusCode>(code);
    return arrow::flight::MakeFlightError(kind, text, extra);
  }
};

// Something that gRPC was given and has not passed on yet, or nothing (since_s is 0).
struct Handing {
  uint64_t id;
  std::string peer;
  std::atomic<double> since_s{0};
};

class Put;

// A batch that waits for Python. `size` is -1 if its structure is not what it says.
struct Arrival {
  std::shared_ptr<Put> put;
  uint64_t ticket;
  Batch batch;
  Bytes metadata;
  int64_t size;
};

// The columns of a batch as a block takes them, which most batches allow: all keys are there or
// none is, all times or none, and no headers. The types are those of its stream, checked before.
struct Columns {
  bool is_plain = false;
  int64_t count = 0;
  const uint8_t *bodies = nullptr, *body_offsets = nullptr;
  const uint8_t *keys = nullptr, *key_offsets = nullptr;  // nullptr: no message has a key
  const uint8_t* times = nullptr;                         // nullptr: no message has one
  int64_t bodies_size = 0, keys_size = 0;
};

inline bool HasAll(const arrow::Array& array) { return array.null_count() == 0; }
inline bool HasNone(const arrow::Array& array) { return array.null_count() == array.length(); }

inline void UseStrings(const arrow::ArrayData& array, const uint8_t** data, int64_t* size,
                       const uint8_t** offsets) {
  static const uint8_t nothing = 0;
  const auto& held = array.buffers[2];
  *data = held && held->size() > 0 ? held->data() : &nothing;
  *size = held ? held->size() : 0;
  *offsets = array.buffers[1]->data() + array.offset * 4;
}

inline Columns ColumnsOf(const arrow::RecordBatch& batch) {
  Columns found;
  found.count = batch.num_rows();
  auto bodies = batch.GetColumnByName("body"), keys = batch.GetColumnByName("shard_key");
  auto times = batch.GetColumnByName("insertion_ms"), headers = batch.GetColumnByName("headers");
  if (found.count == 0 || !bodies || !keys || !HasAll(*bodies)) return found;
  if (!(HasAll(*keys) || HasNone(*keys)) || (headers && !HasNone(*headers))) return found;
  if (times && !(HasAll(*times) || HasNone(*times))) return found;
  UseStrings(*bodies->data(), &found.bodies, &found.bodies_size, &found.body_offsets);
  if (!HasNone(*keys))
    UseStrings(*keys->data(), &found.keys, &found.keys_size, &found.key_offsets);
  if (times && !HasNone(*times))
    found.times = times->data()->buffers[1]->data() + times->data()->offset * 8;
  found.is_plain = true;
  return found;
}

// So many empty messages in a row are taken for the end of their stream.
constexpr int kEmptyMessages = 1000;

// Where batches of all streams wait, and what the port owes to all clients together.
class Desk {
 public:
  Desk(int64_t max_bytes, int max_calls) : max_bytes_(max_bytes), max_calls_(max_calls) {}

  // One call more, which `Leave` ends; false if there are too many.
  bool Enter() {
    if (calls_.fetch_add(1) < max_calls_) return true;
    calls_--;
    return false;
  }

  void Leave() { calls_--; }

  // Lays a batch down once there is room for it; false once the port stops. Each stream has
  // its window, but there may be thousands of streams, and the disk may be slow.
  bool Lay(Arrival&& arrival) {
    Guard guard(mutex_);
    int64_t size = std::max<int64_t>(arrival.size, 0);
    room_.wait(guard, [&] {
      return stop_.is_set || lying_.empty() || bytes_ + size <= max_bytes_;
    });
    if (stop_.is_set) return false;
    owed_++;
    bytes_ += size;
    lying_.push_back(std::move(arrival));
    guard.unlock();
    work_.notify_one();
    return true;
  }

  // Waits for batches or a nudge; false when the desk is closed and empty.
  bool Take(std::vector<Arrival>* taken) {
    Guard guard(mutex_);
    work_.wait(guard, [&] { return !lying_.empty() || nudged_ || closed_; });
    nudged_ = false;
    std::move(lying_.begin(), lying_.end(), std::back_inserter(*taken));
    lying_.clear();
    bytes_ = 0;
    room_.notify_all();
    return !closed_ || !taken->empty();
  }

  void Nudge() {
    {
      Guard guard(mutex_);
      nudged_ = true;
    }
    work_.notify_one();
  }

  void Settle() {
    Guard guard(mutex_);
    if (--owed_ == 0) settled_.notify_all();
  }

  // From now on every batch is refused so.
  void Stop(const Refusal& refusal) {
    Guard guard(mutex_);
    stop_ = refusal;
    room_.notify_all();
  }

  Refusal stop() {
    Guard guard(mutex_);
    return stop_;
  }

  bool WaitSettled(double timeout_s) {
    Guard guard(mutex_);
    auto patience = std::chrono::duration<double>(timeout_s);
    return settled_.wait_for(guard, patience, [&] { return owed_ == 0; });
  }

  void Close() {
    {
      Guard guard(mutex_);
      closed_ = true;
    }
    work_.notify_all();
  }

  std::shared_ptr<Handing> Register(const std::string& peer) {
    auto made = std::make_shared<Handing>();
    made->peer = peer;
    Guard guard(mutex_);
    made->id = next_handing_++;
    handings_.insert(made);
    return made;
  }

  void Forget(const std::shared_ptr<Handing>& handing) {
    Guard guard(mutex_);
    handings_.erase(handing);
  }

  std::vector<std::shared_ptr<Handing>> UnderWay() {
    Guard guard(mutex_);
    std::vector<std::shared_ptr<Handing>> found;
    for (const auto& one : handings_)
      if (one->since_s.load() != 0) found.push_back(one);
    return found;
  }

 private:
  const int64_t max_bytes_;
  const int max_calls_;
  std::atomic<int> calls_{0};
  std::mutex mutex_;
  std::condition_variable work_, room_, settled_;
  std::deque<Arrival> lying_;
  std::set<std::shared_ptr<Handing>> handings_;
  Refusal stop_;
  uint64_t next_handing_ = 1;
  int64_t owed_ = 0, bytes_ = 0;
  bool nudged_ = false, closed_ = false;
};

// For as long as a call lasts: who is on its other side.
class Call {
 public:
  Call(const arrow::flight::ServerCallContext& context, std::shared_ptr<Desk> desk)
      : desk_(std::move(desk)), handing_(desk_->Register(context.peer())), context_(&context) {}
  ~Call() { desk_->Forget(handing_); }

  const std::string& peer() const { return handing_->peer; }
  const std::string& identity() const { return context_->peer_identity(); }
  bool is_cancelled() const { return context_->is_cancelled(); }
  bool is_authorized() const { return context_->incoming_headers().count("authorization") != 0; }
  std::string authorization() const {
    auto found = context_->incoming_headers().find("authorization");
    return found == context_->incoming_headers().end() ? "" : std::string(found->second);
  }

  void HandOver() { handing_->since_s = Now(); }
  void HandedOver() { handing_->since_s = 0; }

 private:
  std::shared_ptr<Desk> desk_;
  std::shared_ptr<Handing> handing_;
  const arrow::flight::ServerCallContext* context_;
};

// One stream of batches: its window, and its answers in the order of their batches.
class Put : public std::enable_shared_from_this<Put> {
 public:
  Put(Desk* desk, Call* call, arrow::flight::FlightMetadataWriter* writer, int max_batches,
      int64_t max_bytes)
      : desk_(desk), call_(call), writer_(writer), max_batches_(max_batches),
        max_bytes_(max_bytes) {}

  std::vector<std::string> path;
  std::shared_ptr<arrow::Schema> schema;
  void* owner = nullptr;  // what Python made of it

  // Lays a batch on the desk once there is room for it; false once the port stops.
  bool Add(Batch batch, Bytes metadata, int64_t size) {
    uint64_t ticket;
    {
      Guard guard(mutex_);
      room_.wait(guard, [&] { return HasRoom(size); });
      ticket = first_ + answers_.size();
      answers_.push_back(Answer{std::max<int64_t>(size, 0), false, {}});
      bytes_ += std::max<int64_t>(size, 0);
    }
    auto self = shared_from_this();
    if (desk_->Lay({self, ticket, std::move(batch), std::move(metadata), size})) return true;
    Guard guard(mutex_);
    bytes_ -= answers_.back().size;
    answers_.pop_back();
    return false;
  }

  // The answer to a batch; from any thread, in any order.
  void Fill(uint64_t ticket, std::string&& text) {
    Guard guard(mutex_);
    auto& answer = answers_[ticket - first_];
    answer.text = std::move(text);
    answer.is_ready = true;
    if (ticket == first_) ready_.notify_one();
  }

  // Writes answers until all are written and no more will come: the work of a thread.
  void WriteAnswers() {
    Guard guard(mutex_);
    while (true) {
      ready_.wait(guard, [&] { return IsHeadReady() || (over_ && answers_.empty()); });
      if (answers_.empty()) return;
      Answer answer = std::move(answers_.front());
      guard.unlock();
      Write(answer.text);
      guard.lock();
      answers_.pop_front();
      first_++;
      bytes_ -= answer.size;
      room_.notify_one();
      guard.unlock();
      desk_->Settle();
      guard.lock();
    }
  }

  void End() {
    Guard guard(mutex_);
    over_ = true;
    ready_.notify_one();
  }

 private:
  struct Answer {
    int64_t size;
    bool is_ready;
    std::string text;
  };

  bool IsHeadReady() const { return !answers_.empty() && answers_.front().is_ready; }

  // One that is larger than the whole window goes alone.
  bool HasRoom(int64_t size) const {
    bool fits = static_cast<int>(answers_.size()) < max_batches_ && bytes_ + size <= max_bytes_;
    return fits || answers_.empty();
  }

  // A client that has gone is told nothing: what it sent is carried out all the same.
  void Write(const std::string& text) {
    if (is_gone_) return;
    call_->HandOver();
    arrow::Buffer buffer(text);
    is_gone_ = !writer_->WriteMetadata(buffer).ok();
    call_->HandedOver();
  }

  Desk* desk_;
  Call* call_;
  arrow::flight::FlightMetadataWriter* writer_;
  const int max_batches_;
  const int64_t max_bytes_;
  std::mutex mutex_;
  std::condition_variable room_, ready_;
  std::deque<Answer> answers_;
  uint64_t first_ = 0;
  int64_t bytes_ = 0;
  bool over_ = false, is_gone_ = false;
};

// An answer on its way to its stream.
struct Filling {
  std::shared_ptr<Put> put;
  uint64_t ticket;
  std::string text;
};

inline void FillAll(std::vector<Filling>& answers) {
  for (auto& one : answers) one.put->Fill(one.ticket, std::move(one.text));
}

// What Python does, each with its interpreter's lock. None of them throws.
struct Hooks {
  void* python = nullptr;
  // Who may put what: gives `put->owner`, or fills the refusal.
  void (*open_put)(void* python, Call*, Put*, Refusal*) = nullptr;
  void (*close_put)(void* python, Put*) = nullptr;
  // One call too many: what its client is told.
  void (*crowded)(void* python, Refusal*) = nullptr;
  // A stream that cannot be read as Arrow: what its client is told.
  void (*malformed)(void* python, const std::string& text, Refusal*) = nullptr;
  void (*act)(void* python, Call*, const std::string& type, const Bytes& body,
              std::vector<Bytes>*, void** more, Refusal*) = nullptr;
  // Of an iterator of further results (`more`), which `close_get` ends; nullptr at its end.
  void (*next_result)(void* python, void* more, Bytes*, Refusal*) = nullptr;
  void (*end_act)(void* python) = nullptr;
  // An iterator of batches, each of which `next_rows` asks for; nullptr at its end. It may ask
  // for fewer columns than all: then it says which.
  void* (*open_get)(void* python, Call*, const std::string& ticket,
                    std::shared_ptr<arrow::Schema>*, Refusal*) = nullptr;
  void (*next_rows)(void* python, void* rows, Batch*, Refusal*) = nullptr;
  void (*close_get)(void* python, void* rows) = nullptr;
  void (*list_actions)(void* python, std::vector<arrow::flight::ActionType>*) = nullptr;
};

// The rows of a read; a batch is with gRPC from when it is given to when the next is wanted.
class Rows : public arrow::RecordBatchReader {
 public:
  Rows(const Hooks& hooks, std::shared_ptr<arrow::Schema> schema, std::shared_ptr<Call> call)
      : hooks_(hooks), schema_(std::move(schema)), call_(std::move(call)) {}
  ~Rows() override {
    if (rows_ != nullptr) hooks_.close_get(hooks_.python, rows_);
  }

  Status Open(const std::string& ticket) {
    Refusal refusal;
    rows_ = hooks_.open_get(hooks_.python, call_.get(), ticket, &schema_, &refusal);
    return refusal.ToStatus();
  }

  std::shared_ptr<arrow::Schema> schema() const override { return schema_; }

  Status ReadNext(Batch* batch) override {
    call_->HandedOver();
    Refusal refusal;
    hooks_.next_rows(hooks_.python, rows_, batch, &refusal);
    call_->HandOver();
    return refusal.ToStatus();
  }

 private:
  const Hooks& hooks_;
  std::shared_ptr<arrow::Schema> schema_;
  std::shared_ptr<Call> call_;
  void* rows_ = nullptr;
};

// The results of an action: those that are there, then what an iterator gives, if there is one.
// The call lasts until gRPC has taken the last.
class Results : public arrow::flight::ResultStream {
 public:
  Results(const Hooks& hooks, std::shared_ptr<Call> call, std::vector<Bytes>&& results, void* more)
      : hooks_(hooks), call_(std::move(call)), results_(std::move(results)), more_(more) {}
  ~Results() override {
    if (more_ != nullptr) hooks_.close_get(hooks_.python, more_);
    hooks_.end_act(hooks_.python);
  }

  arrow::Result<std::unique_ptr<arrow::flight::Result>> Next() override {
    call_->HandedOver();
    Bytes found;
    if (next_ < results_.size()) {
      found = std::move(results_[next_++]);
    } else if (more_ != nullptr) {
      Refusal refusal;
      hooks_.next_result(hooks_.python, more_, &found, &refusal);
      ARROW_RETURN_NOT_OK(refusal.ToStatus());
    }
    if (!found) return nullptr;
    call_->HandOver();
    return std::make_unique<arrow::flight::Result>(arrow::flight::Result{std::move(found)});
  }

 private:
  const Hooks& hooks_;
  std::shared_ptr<Call> call_;
  std::vector<Bytes> results_;
  void* more_;
  size_t next_ = 0;
};

// Counts calls from their first byte on. A call has a thread before it has said what it wants, and
// Arrow waits for that: whoever says nothing is seen by nobody else.
class Door : public arrow::flight::ServerMiddlewareFactory {
 public:
  Door(std::shared_ptr<Desk> desk, const Hooks& hooks) : desk_(std::move(desk)), hooks_(hooks) {}

  Status StartCall(const arrow::flight::CallInfo&, const arrow::flight::ServerCallContext&,
                   std::shared_ptr<arrow::flight::ServerMiddleware>* entered) override {
    if (desk_->Enter()) {
      *entered = std::make_shared<Entered>(desk_);
      return Status::OK();
    }
    Refusal refusal;
    hooks_.crowded(hooks_.python, &refusal);
    return refusal.ToStatus();
  }

 private:
  struct Entered : arrow::flight::ServerMiddleware {
    explicit Entered(std::shared_ptr<Desk> desk) : desk_(std::move(desk)) {}
    ~Entered() override { desk_->Leave(); }
    std::string name() const override { return "polybus-door"; }
    void SendingHeaders(arrow::flight::AddCallHeaders*) override {}
    void CallCompleted(const Status&) override {}
    std::shared_ptr<Desk> desk_;
  };

  std::shared_ptr<Desk> desk_;
  const Hooks hooks_;
};

class Service : public arrow::flight::FlightServerBase {
 public:
  Service(std::shared_ptr<Desk> desk, const Hooks& hooks, std::shared_ptr<arrow::Schema> rows,
          int max_batches, int64_t max_bytes)
      : desk_(std::move(desk)), hooks_(hooks), rows_schema_(std::move(rows)),
        max_batches_(max_batches), max_bytes_(max_bytes) {}

  Status Open(arrow::flight::FlightServerOptions& options) {
    options.middleware.emplace_back("polybus-door", std::make_shared<Door>(desk_, hooks_));
    return Init(options);
  }

  Status DoPut(const arrow::flight::ServerCallContext& context,
               std::unique_ptr<arrow::flight::FlightMessageReader> reader,
               std::unique_ptr<arrow::flight::FlightMetadataWriter> writer) override {
    Call call(context, desk_);
    auto put = std::make_shared<Put>(desk_.get(), &call, writer.get(), max_batches_, max_bytes_);
    put->path = reader->descriptor().path;
    auto schema = reader->GetSchema();
    if (!schema.ok()) return Malformed("the stream begins with no schema: ", schema.status());
    put->schema = *schema;
    Refusal refusal;
    hooks_.open_put(hooks_.python, &call, put.get(), &refusal);
    if (refusal.is_set) return refusal.ToStatus();
    std::thread answering;
    try {
      answering = std::thread([put] { put->WriteAnswers(); });
    } catch (const std::system_error& error) {  // as many as the process may have
      hooks_.close_put(hooks_.python, put.get());
      return arrow::flight::MakeFlightError(arrow::flight::FlightStatusCode::Unavailable,
                                            "the bus has no thread left for this stream");
    }
    Status ended = ReadBatches(call, reader.get(), put.get());
    put->End();
    answering.join();
    hooks_.close_put(hooks_.python, put.get());
    return ended;
  }

  Status DoGet(const arrow::flight::ServerCallContext& context,
               const arrow::flight::Ticket& ticket,
               std::unique_ptr<arrow::flight::FlightDataStream>* stream) override {
    auto call = std::make_shared<Call>(context, desk_);
    auto rows = std::make_shared<Rows>(hooks_, rows_schema_, std::move(call));
    ARROW_RETURN_NOT_OK(rows->Open(ticket.ticket));
    *stream = std::make_unique<arrow::flight::RecordBatchStream>(rows);
    return Status::OK();
  }

  Status DoAction(const arrow::flight::ServerCallContext& context,
                  const arrow::flight::Action& action,
                  std::unique_ptr<arrow::flight::ResultStream>* stream) override {
    auto call = std::make_shared<Call>(context, desk_);
    std::vector<Bytes> results;
    void* more = nullptr;
    Refusal refusal;
    hooks_.act(hooks_.python, call.get(), action.type, action.body, &results, &more, &refusal);
    if (refusal.is_set) return refusal.ToStatus();
    *stream = std::make_unique<Results>(hooks_, std::move(call), std::move(results), more);
    return Status::OK();
  }

  Status ListActions(const arrow::flight::ServerCallContext&,
                     std::vector<arrow::flight::ActionType>* actions) override {
    hooks_.list_actions(hooks_.python, actions);
    return Status::OK();
  }

 private:
  // Until all was read, the connection has ended, or the port stops. Of a message that is empty
  // Arrow says what it says at the end, but after the end it says it again, at once.
  Status ReadBatches(const Call& call, arrow::flight::FlightMessageReader* reader, Put* put) {
    int nothing = 0;
    while (true) {
      auto next = reader->Next();
      if (!next.ok()) {
        const Status& status = next.status();  // of any kind: Arrow says IOError of bad bytes, too
        return call.is_cancelled() ? status : Malformed("the stream is no Arrow: ", status);
      }
      auto& chunk = *next;
      if (!chunk.data && !chunk.app_metadata) {
        if (++nothing > kEmptyMessages) return Status::OK();
        continue;
      }
      nothing = 0;
      int64_t size = SizeOf(chunk.data);
      if (!put->Add(std::move(chunk.data), std::move(chunk.app_metadata), size))
        return desk_->stop().ToStatus();
    }
  }

  // Arrow's accessors trust what they read, so its structural check comes first.
  static int64_t SizeOf(const Batch& batch) {
    if (!batch) return 0;
    if (!batch->Validate().ok()) return -1;
    int64_t used = arrow::util::ReferencedBufferSize(*batch).ValueOr(-1);
    if (used < 0) return -1;
    // What came with it and is no message's is held with it all the same.
    return std::max(used, arrow::util::TotalBufferSize(*batch));
  }

  Status Malformed(const char* what, const Status& status) {
    Refusal refusal;
    hooks_.malformed(hooks_.python, what + status.message(), &refusal);
    return refusal.ToStatus();
  }

  std::shared_ptr<Desk> desk_;
  const Hooks hooks_;
  std::shared_ptr<arrow::Schema> rows_schema_;
  const int max_batches_;
  const int64_t max_bytes_;
};

}  // namespace polybus
