// Bounds of gRPC's server that Arrow does not expose (ADR 0037).
//
// Without them one connection may open any number of streams, send messages of any size, and have
// gRPC unpack gzip without an end. Arrow passes its grpc::ServerBuilder to a hook, and pyarrow
// hides gRPC's functions and headers, so this file goes by the layout of two classes: the first
// members of ServerBuilder, and the option of an int that ServerBuilder::AddChannelArgument makes.
// Before it writes, it checks that both contain what Arrow has put there: no bound of a message,
// and one option, "grpc.so_reuseport" = 0. If they do not, it changes nothing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace polybus {

struct GrpcIntOption {
  const void* functions;
  std::string name;
  int value;
};

struct GrpcBuilder {
  const void* functions;
  int max_receive_bytes, max_send_bytes;
  std::vector<GrpcIntOption*> options;
};

struct GrpcBounds {
  int max_message_bytes;
  int max_streams;  // of a connection

  // Returns whether the bounds are set.
  bool Apply(void* server_builder) const {
    auto* builder = static_cast<GrpcBuilder*>(server_builder);
    if (builder->max_receive_bytes != -1 || builder->options.size() != 1) return false;
    const GrpcIntOption* first = builder->options[0];
    if (first == nullptr || first->name != "grpc.so_reuseport" || first->value != 0) return false;
    builder->max_receive_bytes = max_message_bytes;
    auto add = [&](const char* name, int value) {
      // gRPC owns the option and deletes it through its functions.
      builder->options.push_back(new GrpcIntOption{first->functions, name, value});
    };
    add("grpc.max_concurrent_streams", max_streams);
    add("grpc.compression_enabled_algorithms_bitset", 1);  // of a message: none
    return true;
  }
};

}  // namespace polybus
