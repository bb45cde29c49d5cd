// Relays connections of clients to gRPC, on one thread and without the interpreter's lock (ADR 0043).
//
// gRPC gives each call a thread before our code sees it, also a call that the client has reset
// already. So the relay reads the headers of the client's HTTP/2 frames and passes resets on at a
// bounded rate, for all connections together, and none while gRPC has many threads. While a reset
// has to wait, the bytes of its connection wait with it, in the order in which they came.
//
//   client ──▶ FrameMeter ──▶ server.bytes ──▶ gRPC    each side is read only while nothing waits
//   client ◀───────────────── client.bytes ◀── gRPC    to be written to the other
#pragma once

#include <errno.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace polybus {

// The frames of a client, by their headers alone.
class FrameMeter {
 public:
  struct Scan {
    size_t passed;  // bytes that may be passed on: whole headers, payloads as far as they came
    bool is_held;   // a reset comes next, and `take_reset` has refused it
    bool is_http2;
  };

  // Scans bytes from where the bytes that were passed have ended. `take_reset` returns whether
  // another reset may be passed on.
  template <typename TakeReset>
  Scan Run(const uint8_t* data, size_t size, TakeReset take_reset) {
    size_t at = 0;
    for (; preface_ < sizeof(kPreface) - 1 && at < size; at++)
      if (data[at] != static_cast<uint8_t>(kPreface[preface_++])) return {0, false, false};
    // The latest stream that began in these bytes. If its reset is held, so is its beginning: a
    // call that gRPC has not seen costs nothing.
    size_t begun_at = 0;
    uint32_t begun = kNoStream;
    while (true) {
      size_t skipped = std::min<size_t>(payload_, size - at);
      at += skipped;
      payload_ -= skipped;
      if (size - at < kHeader) return {at, false, true};
      const uint8_t* frame = data + at;
      uint32_t stream = (frame[5] & 0x7f) << 24 | frame[6] << 16 | frame[7] << 8 | frame[8];
      if (frame[3] == kHeaders) {
        begun = stream;
        begun_at = at;
      } else if (frame[3] == kReset) {
        if (!take_reset()) return {stream == begun ? begun_at : at, true, true};
        begun = kNoStream;
      }
      payload_ = frame[0] << 16 | frame[1] << 8 | frame[2];
      at += kHeader;
    }
  }

 private:
  static constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  static constexpr size_t kHeader = 9;
  static constexpr uint8_t kHeaders = 1, kReset = 3;  // types of frames
  static constexpr uint32_t kNoStream = UINT32_MAX;

  size_t preface_ = 0;  // bytes of the preface that have come
  size_t payload_ = 0;  // bytes of the current frame that have not come
};

// Why a connection has ended.
enum class RelayEnd { kClosed, kResets, kNotHttp2 };

struct EndedRelay {
  uint64_t id;
  RelayEnd reason;
};

class Http2Relay {
 public:
  // Cuts a connection that resets more than `max_resets_per_s`. All connections together pass on
  // `all_resets_per_s`, and none while the process has `max_threads` more than before.
  Http2Relay(int max_resets_per_s, double all_resets_per_s, int max_threads)
      : max_resets_(max_resets_per_s),
        all_resets_per_s_(all_resets_per_s),
        max_threads_(max_threads),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        ended_event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (epoll_ < 0 || wake_ < 0 || ended_event_ < 0)
      throw std::system_error(errno, std::generic_category());
    epoll_event wanted{EPOLLIN, {nullptr}};
    epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &wanted);
    thread_ = std::thread([this] { Run(); });
  }

  ~Http2Relay() {
    Stop();
    for (int descriptor : {epoll_, wake_, ended_event_}) close(descriptor);
  }

  // Relays between two sockets, which do not block and belong to the relay from now on.
  void Add(uint64_t id, int client, int server) {
    auto link = std::make_unique<Link>(id, client, server);
    {
      std::lock_guard guard(mutex_);
      begun_.push_back(link.get());
      links_.emplace(id, std::move(link));
    }
    Wake();
  }

  // Ends a connection, if it exists.
  bool Cut(uint64_t id) {
    std::lock_guard guard(mutex_);
    auto found = links_.find(id);
    if (found == links_.end()) return false;
    // The relay's thread sees the hang-up and closes the descriptors.
    shutdown(found->second->client.descriptor, SHUT_RDWR);
    shutdown(found->second->server.descriptor, SHUT_RDWR);
    return true;
  }

  // Returns the bytes that a client has acknowledged, -1 if it is not connected over TCP.
  int64_t ConfirmedBytes(uint64_t id) {
    std::lock_guard guard(mutex_);
    auto found = links_.find(id);
    if (found == links_.end()) return -1;
    tcp_info info{};
    socklen_t size = sizeof info;
    int client = found->second->client.descriptor;
    if (getsockopt(client, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return -1;
    return static_cast<int64_t>(info.tcpi_bytes_acked);
  }

  // Readable while there are ended connections to take.
  int ended_event() const { return ended_event_; }

  std::vector<EndedRelay> TakeEnded() {
    uint64_t number;
    [[maybe_unused]] auto taken = read(ended_event_, &number, sizeof number);
    std::lock_guard guard(mutex_);
    return std::exchange(ended_, {});
  }

  // Ends all connections and the thread.
  void Stop() {
    {
      std::lock_guard guard(mutex_);
      if (std::exchange(is_stopped_, true)) return;
    }
    Wake();
    thread_.join();
    while (!links_.empty()) End(links_.begin()->second.get(), RelayEnd::kClosed);
  }

 private:
  // Bytes that are read at a time, and at most held, from gRPC and from a client.
  static constexpr size_t kChunk = 128 << 10, kClientChunk = 64 << 10;
  // After a read of this size gRPC's end gets a larger buffer, of `kBuffer`.
  static constexpr ssize_t kLarge = 64 << 10;
  static constexpr int kBuffer = 1 << 20;
  static constexpr rlim_t kMaxDescriptors = 65536;  // that are searched, in a few milliseconds
  static constexpr int kEvents = 64;
  // Resets of all connections together that may be passed on at once: each may cost a thread.
  static constexpr double kBurst = 32;
  static constexpr double kMaxHeldS = 2;
  // A reset that was passed on has cost its thread before this time is over, on any machine that is
  // not overloaded for as long.
  static constexpr double kCalmS = 1;
  static constexpr int kTickMs = 1;

  struct Link;

  // One socket, and the bytes that wait to be written to it.
  struct Socket {
    Link* link;
    int descriptor;
    uint32_t interest = 0;
    std::vector<uint8_t> bytes;
    size_t writable = 0;  // the first of `bytes`; the others may not be passed on yet
  };

  struct Link {
    Link(uint64_t id, int client_fd, int server_fd)
        : id(id), client{this, client_fd}, server{this, server_fd} {}
    uint64_t id;
    Socket client, server;
    FrameMeter meter;
    bool is_held = false, is_over = false, has_buffer = false;
    double held_since_s = 0, second_s = 0;
    int resets = 0;  // in this second
  };

  static double Now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  void Wake() {
    uint64_t one = 1;
    [[maybe_unused]] auto written = write(wake_, &one, sizeof one);
  }

  void Run() {
    epoll_event events[kEvents];
    while (true) {
      int found = epoll_wait(epoll_, events, kEvents, held_.empty() ? -1 : kTickMs);
      for (int at = 0; at < found; at++) {
        if (events[at].data.ptr == nullptr) {
          if (!Begin()) return;
        } else {
          Handle(static_cast<Socket*>(events[at].data.ptr), events[at].events);
        }
      }
      if (!held_.empty()) ReleaseHeld();
      ended_links_.clear();  // no event of this turn refers to them any longer
    }
  }

  // Watches new connections. Returns false once the relay is stopped.
  bool Begin() {
    uint64_t number;
    [[maybe_unused]] auto taken = read(wake_, &number, sizeof number);
    std::lock_guard guard(mutex_);
    for (Link* link : std::exchange(begun_, {})) Watch(link);
    return !is_stopped_;
  }

  void Handle(Socket* end, uint32_t events) {
    Link* link = end->link;
    if (link->is_over) return;
    Socket* other = end == &link->client ? &link->server : &link->client;
    bool is_open = true;
    if (events & EPOLLOUT) is_open = Write(end);
    if (is_open && (events & EPOLLIN)) is_open = Read(end, other);
    if (!(events & (EPOLLIN | EPOLLOUT))) is_open = false;  // a hang-up
    Continue(link, is_open);
  }

  void Continue(Link* link, bool is_open) {
    if (is_open)
      Watch(link);
    else if (!link->is_over)
      End(link, RelayEnd::kClosed);
  }

  // Reads once and passes the bytes on. Returns false at the end of the connection.
  bool Read(Socket* from, Socket* to) {
    bool is_client = from == &from->link->client;
    size_t kept = to->bytes.size();  // an incomplete header of a frame
    std::copy(to->bytes.begin(), to->bytes.end(), buffer_);
    size_t wanted = (is_client ? kClientChunk : kChunk) - kept;
    ssize_t count = recv(from->descriptor, buffer_ + kept, wanted, MSG_DONTWAIT);
    if (count < 0) return errno == EAGAIN || errno == EINTR;
    if (count == 0) return false;
    to->bytes.clear();
    if (is_client) return PassUp(from->link, buffer_, kept + count);
    if (count > kLarge && !std::exchange(from->link->has_buffer, true))
      WidenGrpcEnd(from->descriptor);
    return Send(to, buffer_, count, count);
  }

  // Gives gRPC's end of a connection a larger buffer. While its buffer is full, gRPC leaves each
  // write to another thread, and a usual buffer holds less than two batches of a read. The end is a
  // descriptor of this process whose peer is `server`.
  static void WidenGrpcEnd(int server) {
    sockaddr_un own{}, peer{};
    socklen_t own_size = sizeof own;
    if (getsockname(server, reinterpret_cast<sockaddr*>(&own), &own_size) != 0) return;
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    int most = static_cast<int>(std::min<rlim_t>(limit.rlim_cur, kMaxDescriptors));
    for (int end = 0; end < most; end++) {
      socklen_t size = sizeof peer;
      if (getpeername(end, reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
      if (size != own_size || memcmp(&peer, &own, size) != 0) continue;
      setsockopt(end, SOL_SOCKET, SO_SNDBUF, &kBuffer, sizeof kBuffer);
      return;
    }
  }

  // Passes bytes of the client to gRPC, up to a reset that must wait. Returns false if the
  // connection ends.
  bool PassUp(Link* link, const uint8_t* data, size_t size) {
    link->held_since_s = 0;
    auto scan = link->meter.Run(data, size, [&] {
      if (!held_.empty() || !HasReset()) return false;
      CountReset(link);
      return true;
    });
    return Pass(link, scan, data, size);
  }

  bool Pass(Link* link, const FrameMeter::Scan& scan, const uint8_t* data, size_t size) {
    if (!scan.is_http2) return End(link, RelayEnd::kNotHttp2);
    if (link->resets > max_resets_) return End(link, RelayEnd::kResets);
    if (scan.is_held) {
      link->is_held = true;
      if (link->held_since_s == 0) link->held_since_s = refilled_s_;
      held_.push_back(link);
    }
    return Send(&link->server, data, scan.passed, size);
  }

  // Returns whether a reset of any connection may be passed on now.
  bool HasReset() {
    double now_s = Now();
    resets_left_ = std::min(kBurst, resets_left_ + (now_s - refilled_s_) * all_resets_per_s_);
    refilled_s_ = now_s;
    int threads = CountThreads();
    if (now_s - passed_s_ >= kCalmS) calm_threads_ = threads;
    return resets_left_ >= 1 && threads < calm_threads_ + max_threads_;
  }

  // Returns the threads of this process, plus two.
  static int CountThreads() {
    struct stat tasks;
    return stat("/proc/self/task", &tasks) == 0 ? static_cast<int>(tasks.st_nlink) : 0;
  }

  void CountReset(Link* link) {
    resets_left_--;
    passed_s_ = refilled_s_;
    if (refilled_s_ - link->second_s >= 1) {
      link->second_s = refilled_s_;
      link->resets = 0;
    }
    link->resets++;
  }

  // Lets held connections pass a reset each, in turn.
  void ReleaseHeld() {
    while (!held_.empty() && HasReset()) {
      Link* link = held_.front();
      held_.pop_front();
      link->is_held = false;
      auto bytes = std::move(link->server.bytes);
      size_t ready = link->server.writable;
      bool has_passed = false;
      auto scan = link->meter.Run(bytes.data() + ready, bytes.size() - ready, [&] {
        if (std::exchange(has_passed, true)) return false;
        CountReset(link);
        return true;
      });
      scan.passed += ready;
      Continue(link, Pass(link, scan, bytes.data(), bytes.size()));
    }
    for (auto at = held_.size(); at-- > 0;)
      if (refilled_s_ - held_[at]->held_since_s > kMaxHeldS) End(held_[at], RelayEnd::kResets);
  }

  // Writes the first `writable` of `size` bytes and keeps the rest. Returns false after an error.
  bool Send(Socket* to, const uint8_t* data, size_t writable, size_t size) {
    ssize_t sent = writable == 0 ? 0 : send(to->descriptor, data, writable, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno != EAGAIN && errno != EINTR) return false;
      sent = 0;
    }
    to->bytes.assign(data + sent, data + size);
    to->writable = writable - sent;
    if (to->bytes.empty()) std::vector<uint8_t>().swap(to->bytes);
    return true;
  }

  bool Write(Socket* to) {
    ssize_t sent = send(to->descriptor, to->bytes.data(), to->writable, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    to->bytes.erase(to->bytes.begin(), to->bytes.begin() + sent);
    to->writable -= sent;
    if (to->bytes.empty()) std::vector<uint8_t>().swap(to->bytes);
    return true;
  }

  // Waits for what each socket needs next.
  void Watch(Link* link) {
    Link& one = *link;
    // A client whose resets are held may hang up meanwhile, which then ends them all.
    uint32_t from_client = one.is_held ? EPOLLRDHUP : one.server.writable > 0 ? 0 : EPOLLIN;
    SetInterest(&one.client, from_client | (one.client.writable > 0 ? EPOLLOUT : 0));
    uint32_t from_server = one.client.writable > 0 ? 0 : EPOLLIN;
    SetInterest(&one.server, from_server | (one.server.writable > 0 ? EPOLLOUT : 0));
  }

  void SetInterest(Socket* end, uint32_t interest) {
    if (end->interest == interest) return;
    // A socket without interest is not watched: it would report a hang-up again and again.
    int change = interest == 0 ? EPOLL_CTL_DEL : end->interest == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
    epoll_event wanted{end->interest = interest, {end}};
    epoll_ctl(epoll_, change, end->descriptor, &wanted);
  }

  // Ends a connection. Returns false.
  bool End(Link* link, RelayEnd reason) {
    link->is_over = true;
    if (link->is_held) held_.erase(std::find(held_.begin(), held_.end(), link));
    std::lock_guard guard(mutex_);
    close(link->client.descriptor);
    close(link->server.descriptor);
    ended_.push_back({link->id, reason});
    auto found = links_.find(link->id);
    ended_links_.push_back(std::move(found->second));
    links_.erase(found);
    uint64_t one = 1;
    [[maybe_unused]] auto written = write(ended_event_, &one, sizeof one);
    return false;
  }

  const int max_resets_;
  const double all_resets_per_s_;
  const int max_threads_;
  const int epoll_, wake_, ended_event_;
  std::thread thread_;
  std::mutex mutex_;  // of the members up to `is_stopped_`
  std::unordered_map<uint64_t, std::unique_ptr<Link>> links_;
  std::vector<Link*> begun_;
  std::vector<EndedRelay> ended_;
  bool is_stopped_ = false;
  // Of the relay's thread alone.
  uint8_t buffer_[kChunk];
  std::deque<Link*> held_;
  std::vector<std::unique_ptr<Link>> ended_links_;
  double resets_left_ = kBurst, refilled_s_ = 0, passed_s_ = 0;
  int calm_threads_ = 0;  // while no reset was passed on
};

}  // namespace polybus
