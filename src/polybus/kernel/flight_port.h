// The Arrow Flight service of the native port, below Python: see flight_port.pyx.
//
// Reading and answering a stream of batches needs no Python. gRPC's thread of the stream reads
// batches and pushes each to the queue; a second thread writes the answers in order as they
// become ready. One Python thread pops all queued batches at once.
//
//   reading thread ──▶ BatchQueue ──▶ Python, many at once ──▶ PutStream::SetAnswer ──▶ writer
//        ▲ waits while the stream's window is full                                       │
//        └────────────────────────────────── in order ───────────────────────────────────┘
//
// All other work (opening a stream, actions, reads) calls Python directly on gRPC's thread:
// see Hooks.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
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
#include <arrow/util/utf8.h>

#include "flight_message.h"
#include "grpc_bounds.h"

namespace polybus {

using arrow::Status;
using Batch = std::shared_ptr<arrow::RecordBatch>;
using Bytes = std::shared_ptr<arrow::Buffer>;
using Guard = std::unique_lock<std::mutex>;

inline double Now() {  // the same clock as Python's time.monotonic()
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The error that a call ends with. Unset means success.
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

// A write that gRPC has not completed. since_s is 0 while there is none.
struct Handover {
  uint64_t id;
  std::string peer;
  std::atomic<double> since_s{0};
};

class PutStream;

// A batch that waits for Python. `size` is -1 if it fails Arrow's structural check.
struct ReceivedBatch {
  std::shared_ptr<PutStream> put;
  uint64_t ticket;
  Batch batch;
  Bytes metadata;
  int64_t size;
};

// The columns of a batch in the form that a block copies. Most batches allow it: every message has
// a key or none has, likewise times, and none has headers. The stream's schema was checked before.
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

// A run of this many empty messages counts as the end of the stream (see ReadBatches).
constexpr int kEmptyMessages = 1000;
// Fields of a schema, nested ones included, and bytes of a name: more than a valid schema has.
constexpr int kMaxFields = 64, kMaxNameBytes = 255;

// Bytes of compressed batches that are unpacked and not answered, of all streams and per user.
class UnpackBudget {
 public:
  UnpackBudget(int64_t max_bytes, int64_t max_user_bytes)
      : max_bytes_(max_bytes), max_user_bytes_(max_user_bytes) {}

  // Reserves bytes until it is destroyed.
  class Charge {
   public:
    Charge(UnpackBudget* budget, std::string user, int64_t size)
        : budget_(budget), user_(std::move(user)), size_(size) {}
    ~Charge() { budget_->Release(user_, size_); }
    Charge(const Charge&) = delete;

   private:
    UnpackBudget* budget_;
    std::string user_;
    int64_t size_;
  };

  // Waits until the bytes fit. Fails if they never will, or once the budget is closed.
  arrow::Result<std::unique_ptr<Charge>> Reserve(const std::string& user, int64_t size) {
    if (size > max_user_bytes_)
      return Status::CapacityError("a compressed batch must unpack to at most ", max_user_bytes_,
                                   " bytes, got ", size);
    Guard guard(mutex_);
    has_room_.wait(guard, [&] {
      return is_closed_ || (total_ + size <= max_bytes_ && used_[user] + size <= max_user_bytes_);
    });
    if (is_closed_) return Status::Cancelled("the bus is stopping");
    total_ += size;
    used_[user] += size;
    return std::make_unique<Charge>(this, user, size);
  }

  void Close() {
    Guard guard(mutex_);
    is_closed_ = true;
    has_room_.notify_all();
  }

 private:
  void Release(const std::string& user, int64_t size) {
    Guard guard(mutex_);
    total_ -= size;
    if ((used_[user] -= size) == 0) used_.erase(user);
    has_room_.notify_all();
  }

  const int64_t max_bytes_, max_user_bytes_;
  std::mutex mutex_;
  std::condition_variable has_room_;
  std::map<std::string, int64_t> used_;
  int64_t total_ = 0;
  bool is_closed_ = false;
};

using Charge = std::unique_ptr<UnpackBudget::Charge>;

// Admits calls. It runs before any other code of ours and without the interpreter's lock: gRPC has
// given the call a thread already, so a call that waits here, or in Python, adds a thread.
class CallGate {
 public:
  explicit CallGate(int max_calls) : max_calls_(max_calls) {}

  // Counts a call. Returns false if there are too many.
  bool Enter() {
    Guard guard(mutex_);
    bool is_admitted = calls_ < max_calls_;
    (is_admitted ? calls_ : refused_)++;
    return is_admitted;
  }

  // Forgets an admitted call. `caller` is the Python object of begin_call, if it has been called.
  void Leave(void* caller) {
    Guard guard(mutex_);
    calls_--;
    if (caller != nullptr) ended_.push_back(caller);
  }

  // Returns the callers of ended calls, at most once each. The thread of a call does not release
  // its caller, because it would wait for the interpreter's lock.
  std::vector<void*> TakeEnded() {
    Guard guard(mutex_);
    return std::exchange(ended_, {});
  }

  // Returns how many calls were refused since the last call.
  int TakeRefused() {
    Guard guard(mutex_);
    return std::exchange(refused_, 0);
  }

 private:
  const int max_calls_;
  std::mutex mutex_;
  std::vector<void*> ended_;
  int calls_ = 0, refused_ = 0;
};

// Calls that wait for the interpreter's lock. A few wait for the lock itself, which they cannot
// leave; the others wait here, and leave if the client cancels them.
class InterpreterQueue {
 public:
  // Returns true when the call may wait for the lock, and then Leave must be called. Returns false
  // if the client has cancelled it.
  bool Enter(const arrow::flight::ServerCallContext& context) {
    while (true) {
      {
        Guard guard(mutex_);
        length_++;
        // gRPC polls to learn whether a call is cancelled, so thousands of calls ask less often.
        auto interval = std::max<std::chrono::microseconds>(kLookInterval, length_ * kLookInterval / 20);
        bool has_room = has_room_.wait_for(guard, interval, [&] { return at_lock_ < kMaxAtLock; });
        length_--;
        at_lock_ += has_room;
        if (has_room) return true;
      }
      if (context.is_cancelled()) return false;
    }
  }

  void Leave() {
    {
      Guard guard(mutex_);
      at_lock_--;
    }
    has_room_.notify_one();
  }

 private:
  static constexpr int kMaxAtLock = 8;
  static constexpr std::chrono::microseconds kLookInterval{5000};

  std::mutex mutex_;
  std::condition_variable has_room_;
  int length_ = 0, at_lock_ = 0;
};

// The batches of all streams that wait for Python, with the limits of the whole port.
class BatchQueue {
 public:
  BatchQueue(int64_t max_bytes, int max_calls, int64_t max_unpacked_bytes,
             int64_t max_user_unpacked_bytes)
      : gate(max_calls), unpacked(max_unpacked_bytes, max_user_unpacked_bytes),
        max_bytes_(max_bytes) {}

  CallGate gate;
  InterpreterQueue interpreter;
  UnpackBudget unpacked;

  // Queues a batch, waiting for room. Returns false once the port stops. The window of a stream
  // does not bound the sum over thousands of streams while the disk is slow; this does.
  bool Push(ReceivedBatch&& arrival) {
    Guard guard(mutex_);
    int64_t size = std::max<int64_t>(arrival.size, 0);
    has_room_.wait(guard, [&] {
      return stop_.is_set || pending_.empty() || bytes_ + size <= max_bytes_;
    });
    if (stop_.is_set) return false;
    unanswered_++;
    bytes_ += size;
    pending_.push_back(std::move(arrival));
    guard.unlock();
    has_work_.notify_one();
    return true;
  }

  // Waits for batches or Wake. Returns false when the queue is closed and empty.
  bool PopAll(std::vector<ReceivedBatch>* received) {
    Guard guard(mutex_);
    has_work_.wait(guard, [&] { return !pending_.empty() || is_woken_ || is_closed_; });
    is_woken_ = false;
    std::move(pending_.begin(), pending_.end(), std::back_inserter(*received));
    pending_.clear();
    bytes_ = 0;
    has_room_.notify_all();
    return !is_closed_ || !received->empty();
  }

  void Wake() {
    {
      Guard guard(mutex_);
      is_woken_ = true;
    }
    has_work_.notify_one();
  }

  // An action without an answer: the port waits for it before it stops, as for a batch.
  class UnansweredAction {
   public:
    explicit UnansweredAction(std::shared_ptr<BatchQueue> queue) : queue_(std::move(queue)) {
      Guard guard(queue_->mutex_);
      queue_->unanswered_++;
    }
    ~UnansweredAction() { queue_->Settle(); }
    UnansweredAction(const UnansweredAction&) = delete;

   private:
    std::shared_ptr<BatchQueue> queue_;
  };

  void Settle() {
    Guard guard(mutex_);
    if (--unanswered_ == 0) settled_.notify_all();
  }

  // Refuses every further batch with this error.
  void Stop(const Refusal& refusal) {
    unpacked.Close();
    Guard guard(mutex_);
    stop_ = refusal;
    has_room_.notify_all();
  }

  Refusal stop() {
    Guard guard(mutex_);
    return stop_;
  }

  bool WaitSettled(double timeout_s) {
    Guard guard(mutex_);
    auto timeout = std::chrono::duration<double>(timeout_s);
    return settled_.wait_for(guard, timeout, [&] { return unanswered_ == 0; });
  }

  void Close() {
    {
      Guard guard(mutex_);
      is_closed_ = true;
    }
    has_work_.notify_all();
  }

  std::shared_ptr<Handover> Register(const std::string& peer) {
    auto made = std::make_shared<Handover>();
    made->peer = peer;
    Guard guard(mutex_);
    made->id = next_handover_++;
    handovers_.insert(made);
    return made;
  }

  void Forget(const std::shared_ptr<Handover>& handing) {
    Guard guard(mutex_);
    handovers_.erase(handing);
  }

  std::vector<std::shared_ptr<Handover>> PendingHandovers() {
    Guard guard(mutex_);
    std::vector<std::shared_ptr<Handover>> found;
    for (const auto& one : handovers_)
      if (one->since_s.load() != 0) found.push_back(one);
    return found;
  }

 private:
  const int64_t max_bytes_;
  std::mutex mutex_;
  std::condition_variable has_work_, has_room_, settled_;
  std::deque<ReceivedBatch> pending_;
  std::set<std::shared_ptr<Handover>> handovers_;
  Refusal stop_;
  uint64_t next_handover_ = 1;
  int64_t unanswered_ = 0, bytes_ = 0;
  bool is_woken_ = false, is_closed_ = false;
};

// The peer of a call, valid while the call lasts.
class FlightCall {
 public:
  FlightCall(const arrow::flight::ServerCallContext& context, std::shared_ptr<BatchQueue> queue)
      : queue_(std::move(queue)), handover_(queue_->Register(context.peer())), context_(&context) {}
  ~FlightCall() { queue_->Forget(handover_); }

  const std::string& peer() const { return handover_->peer; }
  bool is_cancelled() const { return context_->is_cancelled(); }
  // Called before a hook that waits for the interpreter's lock: see InterpreterQueue.
  bool EnterInterpreterQueue() { return queue_->interpreter.Enter(*context_); }
  void LeaveInterpreterQueue() { queue_->interpreter.Leave(); }
  // The Python object that begin_call returned for this call.
  void* caller() const;
  bool is_authorized() const { return context_->incoming_headers().count("authorization") != 0; }
  std::string authorization() const {
    auto found = context_->incoming_headers().find("authorization");
    return found == context_->incoming_headers().end() ? "" : std::string(found->second);
  }

  void BeginHandover() { handover_->since_s = Now(); }
  void EndHandover() { handover_->since_s = 0; }

  // Ends a put at its next message: gRPC has no way to end it before.
  void Refuse(const Refusal& refusal) {
    Guard guard(mutex_);
    refusal_ = refusal;
  }

  Refusal refusal() const {
    Guard guard(mutex_);
    return refusal_;
  }

 private:
  mutable std::mutex mutex_;
  Refusal refusal_;
  std::shared_ptr<BatchQueue> queue_;
  std::shared_ptr<Handover> handover_;
  const arrow::flight::ServerCallContext* context_;
};

// One stream of batches: its window, and the answers in the order of the batches.
class PutStream : public std::enable_shared_from_this<PutStream> {
 public:
  PutStream(BatchQueue* queue, FlightCall* call, arrow::flight::FlightMetadataWriter* writer,
            int max_batches, int64_t max_bytes)
      : queue_(queue), call_(call), writer_(writer), max_batches_(max_batches),
        max_bytes_(max_bytes) {}

  std::vector<std::string> path;
  std::string user;  // that open_put identified
  std::shared_ptr<arrow::Schema> schema;
  void* owner = nullptr;  // the Python object that open_put returned

  // Queues a batch, waiting for room in the window. Returns false once the port stops. The charge
  // for unpacked bytes is held until the batch is answered.
  bool Add(Batch batch, Bytes metadata, int64_t size, Charge charge) {
    uint64_t ticket;
    {
      Guard guard(mutex_);
      has_room_.wait(guard, [&] { return HasRoom(size); });
      ticket = first_ + answers_.size();
      answers_.push_back(Answer{std::max<int64_t>(size, 0), false, {}, std::move(charge)});
      bytes_ += std::max<int64_t>(size, 0);
    }
    auto self = shared_from_this();
    if (queue_->Push({self, ticket, std::move(batch), std::move(metadata), size})) return true;
    Guard guard(mutex_);
    bytes_ -= answers_.back().size;
    answers_.pop_back();
    return false;
  }

  // Sets the answer to a batch; from any thread, in any order.
  void SetAnswer(uint64_t ticket, std::string&& text) {
    Guard guard(mutex_);
    auto& answer = answers_[ticket - first_];
    answer.text = std::move(text);
    answer.is_ready = true;
    if (ticket == first_) ready_.notify_one();
  }

  // Thread body: writes answers until the stream has ended and all are written.
  void WriteAnswers() {
    Guard guard(mutex_);
    while (true) {
      ready_.wait(guard, [&] { return IsHeadReady() || (is_ended_ && answers_.empty()); });
      if (answers_.empty()) return;
      Answer answer = std::move(answers_.front());
      guard.unlock();
      Write(answer.text);
      guard.lock();
      answers_.pop_front();
      first_++;
      bytes_ -= answer.size;
      has_room_.notify_one();
      guard.unlock();
      queue_->Settle();
      guard.lock();
    }
  }

  void End() {
    Guard guard(mutex_);
    is_ended_ = true;
    ready_.notify_one();
  }

 private:
  struct Answer {
    int64_t size;
    bool is_ready;
    std::string text;
    Charge charge;
  };

  bool IsHeadReady() const { return !answers_.empty() && answers_.front().is_ready; }

  // A batch larger than the whole window is admitted alone, or it would wait forever.
  bool HasRoom(int64_t size) const {
    bool fits = static_cast<int>(answers_.size()) < max_batches_ && bytes_ + size <= max_bytes_;
    return fits || answers_.empty();
  }

  // After the client has disconnected its batches are still committed, only not answered.
  void Write(const std::string& text) {
    if (is_gone_) return;
    call_->BeginHandover();
    arrow::Buffer buffer(text);
    is_gone_ = !writer_->WriteMetadata(buffer).ok();
    call_->EndHandover();
  }

  BatchQueue* queue_;
  FlightCall* call_;
  arrow::flight::FlightMetadataWriter* writer_;
  const int max_batches_;
  const int64_t max_bytes_;
  std::mutex mutex_;
  std::condition_variable has_room_, ready_;
  std::deque<Answer> answers_;
  uint64_t first_ = 0;
  int64_t bytes_ = 0;
  bool is_ended_ = false, is_gone_ = false;
};

// An answer to one batch of a stream.
struct BatchAnswer {
  std::shared_ptr<PutStream> put;
  uint64_t ticket;
  std::string text;
};

inline void AnswerAll(std::vector<BatchAnswer>& answers) {
  for (auto& one : answers) one.put->SetAnswer(one.ticket, std::move(one.text));
}

// Callbacks into Python. Each takes the GIL; none throws. A call that the client may have cancelled
// must not wait for the GIL, so open_put, run_action and open_get are called from within the
// InterpreterQueue, which they leave once they have the GIL. begin_call stays in it.
struct Hooks {
  void* python = nullptr;
  // Checks access. Sets `put->owner`, or the refusal.
  void (*open_put)(void* python, FlightCall*, PutStream*, Refusal*) = nullptr;
  void (*close_put)(void* python, PutStream*) = nullptr;
  // Identifies and counts the caller of a call: returns a reference for CallGate::Leave, or sets
  // the refusal.
  void* (*begin_call)(void* python, FlightCall*, Refusal*) = nullptr;
  // The refusal of calls that the gate does not admit: made once, because a refusal in Python
  // would wait for the interpreter's lock.
  Refusal too_many_calls;
  // Sets the refusal for a stream that is not Arrow data, or whose batch is too large.
  void (*on_malformed)(void* python, const std::string& text, bool is_too_large, Refusal*) = nullptr;
  void (*run_action)(void* python, FlightCall*, const std::string& type, const Bytes& body,
              std::vector<Bytes>*, void** more, Refusal*) = nullptr;
  // Returns the next result of the iterator `more`, nullptr at its end; close_get closes it.
  void (*next_result)(void* python, void* more, Bytes*, Refusal*) = nullptr;
  // Opens an iterator of batches for next_rows, which returns nullptr at its end. A read of
  // fewer columns sets the schema.
  void* (*open_get)(void* python, FlightCall*, const std::string& ticket,
                    std::shared_ptr<arrow::Schema>*, Refusal*) = nullptr;
  void (*next_rows)(void* python, void* rows, Batch*, Refusal*) = nullptr;
  void (*close_get)(void* python, void* rows) = nullptr;
  void (*list_actions)(void* python, std::vector<arrow::flight::ActionType>*) = nullptr;
};

// The rows of a read. A batch is in flight from its return until gRPC asks for the next.
class Rows : public arrow::RecordBatchReader {
 public:
  Rows(const Hooks& hooks, std::shared_ptr<arrow::Schema> schema, std::shared_ptr<FlightCall> call)
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
    call_->EndHandover();
    Refusal refusal;
    hooks_.next_rows(hooks_.python, rows_, batch, &refusal);
    call_->BeginHandover();
    return refusal.ToStatus();
  }

 private:
  const Hooks& hooks_;
  std::shared_ptr<arrow::Schema> schema_;
  std::shared_ptr<FlightCall> call_;
  void* rows_ = nullptr;
};

// The results of an action: the ready ones, then those of the iterator, if there is one.
// The call lasts until gRPC has taken the last result.
class Results : public arrow::flight::ResultStream {
 public:
  using Unanswered = std::unique_ptr<BatchQueue::UnansweredAction>;

  Results(const Hooks& hooks, std::shared_ptr<FlightCall> call, Unanswered unanswered,
          std::vector<Bytes>&& results, void* more)
      : hooks_(hooks), call_(std::move(call)), unanswered_(std::move(unanswered)),
        results_(std::move(results)), more_(more) {}
  ~Results() override {
    if (more_ != nullptr) hooks_.close_get(hooks_.python, more_);
  }

  arrow::Result<std::unique_ptr<arrow::flight::Result>> Next() override {
    call_->EndHandover();
    Bytes found;
    if (next_ < results_.size()) {
      found = std::move(results_[next_++]);
    } else if (more_ != nullptr) {
      Refusal refusal;
      hooks_.next_result(hooks_.python, more_, &found, &refusal);
      ARROW_RETURN_NOT_OK(refusal.ToStatus());
    }
    if (!found) return nullptr;
    call_->BeginHandover();
    return std::make_unique<arrow::flight::Result>(arrow::flight::Result{std::move(found)});
  }

 private:
  const Hooks& hooks_;
  std::shared_ptr<FlightCall> call_;
  Unanswered unanswered_;
  std::vector<Bytes> results_;
  void* more_;
  size_t next_ = 0;
};

constexpr char kCallLimiter[] = "polybus-call-limiter";

// Counts calls from their first byte. gRPC gives a call its thread before the first message, and
// Arrow blocks in reading that message, so this is the only place that sees a silent call.
// The caller is identified here, too, because silent calls count against its share.
class CallLimiter : public arrow::flight::ServerMiddlewareFactory {
 public:
  CallLimiter(std::shared_ptr<BatchQueue> queue, const Hooks& hooks) : queue_(std::move(queue)), hooks_(hooks) {}

  Status StartCall(const arrow::flight::CallInfo&, const arrow::flight::ServerCallContext& context,
                   std::shared_ptr<arrow::flight::ServerMiddleware>* middleware) override {
    if (!queue_->gate.Enter()) return hooks_.too_many_calls.ToStatus();
    return Begin(context, middleware);
  }

  struct CountedCall : arrow::flight::ServerMiddleware {
    CountedCall(std::shared_ptr<BatchQueue> queue, void* caller)
        : queue_(std::move(queue)), caller(caller) {}
    ~CountedCall() override { Leave(); }
    std::string name() const override { return kCallLimiter; }
    void SendingHeaders(arrow::flight::AddCallHeaders*) override {}
    void CallCompleted(const Status&) override { Leave(); }

    void Leave() {
      if (!std::exchange(is_over_, true)) queue_->gate.Leave(caller);
    }

    std::shared_ptr<BatchQueue> queue_;
    void* caller;
    bool is_over_ = false;
  };

 private:
  // Identifies and counts the caller of an admitted call.
  Status Begin(const arrow::flight::ServerCallContext& context,
               std::shared_ptr<arrow::flight::ServerMiddleware>* middleware) {
    Refusal refusal;
    FlightCall call(context, queue_);
    if (!call.EnterInterpreterQueue()) {
      queue_->gate.Leave(nullptr);
      return Status::Cancelled("the client has cancelled the call");
    }
    void* caller = hooks_.begin_call(hooks_.python, &call, &refusal);
    call.LeaveInterpreterQueue();
    if (caller == nullptr) {
      queue_->gate.Leave(nullptr);
      return refusal.ToStatus();
    }
    *middleware = std::make_shared<CountedCall>(queue_, caller);
    return Status::OK();
  }

  std::shared_ptr<BatchQueue> queue_;
  const Hooks hooks_;
};

inline void* FlightCall::caller() const {
  auto* counted = static_cast<CallLimiter::CountedCall*>(context_->GetMiddleware(kCallLimiter));
  return counted == nullptr ? nullptr : counted->caller;
}

// Reserves memory for a compressed batch before Arrow unpacks it. Arrow passes the body of each
// message to the server's memory manager, on the thread that reads the stream, and then decodes
// it. The body is a part of the whole message as gRPC received it, so the header is there, too.
//
// Arrow asks a memory manager only for memory of another device, so this claims to be one.
class MessageGuard : public arrow::MemoryManager {
 public:
  // The stream that the current thread reads, and the charge for its latest message.
  struct Reading {
    Reading(UnpackBudget* budget, const std::string& user) : budget(budget), user(user) { Current() = this; }
    ~Reading() { Current() = nullptr; }
    static Reading*& Current() {
      static thread_local Reading* current = nullptr;
      return current;
    }
    UnpackBudget* budget;
    const std::string& user;
    Charge charge;
  };

  static std::shared_ptr<MessageGuard> Make() { return std::make_shared<MessageGuard>(std::make_shared<Wire>()); }
  explicit MessageGuard(const std::shared_ptr<arrow::Device>& device) : MemoryManager(device) {}

  arrow::Result<std::shared_ptr<arrow::io::RandomAccessFile>> GetBufferReader(Bytes) override { return None(); }
  arrow::Result<std::shared_ptr<arrow::io::OutputStream>> GetBufferWriter(Bytes) override { return None(); }
  arrow::Result<std::unique_ptr<arrow::Buffer>> AllocateBuffer(int64_t) override { return None(); }

 protected:
  arrow::Result<Bytes> ViewBufferFrom(const Bytes& body, const std::shared_ptr<MemoryManager>&) override {
    if (body->size() == 0) return body;  // of a schema
    const auto whole = body->parent();
    Span header, found;
    if (!whole || !FindParts({whole->data(), whole->size()}, &header, &found) ||
        found.data != body->data() || found.size != body->size())
      return Status::Invalid("the header of a message is not found");
    ARROW_ASSIGN_OR_RAISE(int64_t unpacked, UnpackedSize(header, found));
    Reading* reading = Reading::Current();
    if (unpacked == 0) return body;
    if (reading == nullptr) return Status::Invalid("the first message must be a schema");
    ARROW_ASSIGN_OR_RAISE(reading->charge, reading->budget->Reserve(reading->user, unpacked));
    return body;
  }

  // Arrow tries this after an error of ViewBufferFrom, and reports this error then.
  arrow::Result<Bytes> CopyBufferFrom(const Bytes& body, const std::shared_ptr<MemoryManager>& from) override {
    return ViewBufferFrom(body, from);
  }

 private:
  struct Wire : arrow::Device {
    const char* type_name() const override { return "polybus::Wire"; }
    std::string ToString() const override { return "polybus::Wire()"; }
    bool Equals(const arrow::Device& other) const override { return this == &other; }
    arrow::DeviceAllocationType device_type() const override { return arrow::DeviceAllocationType::kCPU; }
    std::shared_ptr<arrow::MemoryManager> default_memory_manager() override {
      return std::make_shared<MessageGuard>(shared_from_this());
    }
  };

  static Status None() { return Status::NotImplemented("this memory manager only looks at messages"); }
};

class Service : public arrow::flight::FlightServerBase {
 public:
  Service(std::shared_ptr<BatchQueue> queue, const Hooks& hooks, std::shared_ptr<arrow::Schema> rows,
          int max_batches, int64_t max_bytes)
      : queue_(std::move(queue)), hooks_(hooks), rows_schema_(std::move(rows)),
        max_batches_(max_batches), max_bytes_(max_bytes) {}

  Status Open(arrow::flight::FlightServerOptions& options, const GrpcBounds& bounds) {
    options.middleware.emplace_back(kCallLimiter, std::make_shared<CallLimiter>(queue_, hooks_));
    arrow::util::InitializeUTF8();
    options.memory_manager = MessageGuard::Make();
    options.builder_hook = [&](void* builder) { is_bounded_ = bounds.Apply(builder); };
    return Init(options);
  }

  // Whether gRPC has taken the bounds.
  bool is_bounded() const { return is_bounded_; }

  Status DoPut(const arrow::flight::ServerCallContext& context,
               std::unique_ptr<arrow::flight::FlightMessageReader> reader,
               std::unique_ptr<arrow::flight::FlightMetadataWriter> writer) override {
    FlightCall call(context, queue_);
    auto put = std::make_shared<PutStream>(queue_.get(), &call, writer.get(), max_batches_, max_bytes_);
    put->path = reader->descriptor().path;
    auto schema = reader->GetSchema();
    // A call that was cancelled before its schema must not wait for the interpreter's lock.
    if (!schema.ok() && call.is_cancelled()) return schema.status();
    if (!schema.ok()) return Malformed("the stream does not begin with a schema: ", schema.status());
    put->schema = *schema;
    int fields_left = kMaxFields;
    Status checked = CheckFields((*schema)->fields(), &fields_left);
    if (!checked.ok()) return Malformed("", checked);
    if (!call.EnterInterpreterQueue()) return Status::Cancelled("the client has cancelled the put");
    Refusal refusal;
    hooks_.open_put(hooks_.python, &call, put.get(), &refusal);
    if (refusal.is_set) return refusal.ToStatus();
    std::thread answering;
    try {
      answering = std::thread([put] { put->WriteAnswers(); });
    } catch (const std::system_error& error) {  // the process's limit of threads
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
    auto call = std::make_shared<FlightCall>(context, queue_);
    if (!call->EnterInterpreterQueue()) return Status::Cancelled("the client has cancelled the read");
    auto rows = std::make_shared<Rows>(hooks_, rows_schema_, std::move(call));
    ARROW_RETURN_NOT_OK(rows->Open(ticket.ticket));
    *stream = std::make_unique<arrow::flight::RecordBatchStream>(rows);
    return Status::OK();
  }

  Status DoAction(const arrow::flight::ServerCallContext& context,
                  const arrow::flight::Action& action,
                  std::unique_ptr<arrow::flight::ResultStream>* stream) override {
    auto call = std::make_shared<FlightCall>(context, queue_);
    if (!call->EnterInterpreterQueue()) return Status::Cancelled("the client has cancelled the action");
    auto unanswered = std::make_unique<BatchQueue::UnansweredAction>(queue_);
    std::vector<Bytes> results;
    void* more = nullptr;
    Refusal refusal;
    hooks_.run_action(hooks_.python, call.get(), action.type, action.body, &results, &more, &refusal);
    if (refusal.is_set) return refusal.ToStatus();
    *stream = std::make_unique<Results>(hooks_, std::move(call), std::move(unanswered), std::move(results), more);
    return Status::OK();
  }

  Status ListActions(const arrow::flight::ServerCallContext&,
                     std::vector<arrow::flight::ActionType>* actions) override {
    hooks_.list_actions(hooks_.python, actions);
    return Status::OK();
  }

 private:
  // Reads until the stream or its connection ends, or the port stops. Arrow returns the same for
  // an empty message as for the end of the stream; only after the end it returns it repeatedly.
  Status ReadBatches(const FlightCall& call, arrow::flight::FlightMessageReader* reader, PutStream* put) {
    int empty = 0;
    while (true) {
      MessageGuard::Reading reading(&queue_->unpacked, put->user);
      auto next = reader->Next();
      if (Refusal refusal = call.refusal(); refusal.is_set) return refusal.ToStatus();
      if (!next.ok()) {
        const Status& status = next.status();  // any kind: Arrow uses IOError for bad bytes, too
        return call.is_cancelled() ? status : Malformed("the stream is not Arrow data: ", status);
      }
      auto& chunk = *next;
      if (!chunk.data && !chunk.app_metadata) {
        if (++empty > kEmptyMessages) return Status::OK();
        continue;
      }
      empty = 0;
      int64_t size = SizeOf(chunk.data);
      if (!put->Add(std::move(chunk.data), std::move(chunk.app_metadata), size, std::move(reading.charge)))
        return queue_->stop().ToStatus();
    }
  }

  // Arrow's accessors trust the buffers, so the structural check comes first.
  static int64_t SizeOf(const Batch& batch) {
    if (!batch) return 0;
    if (!batch->Validate().ok()) return -1;
    int64_t used = arrow::util::ReferencedBufferSize(*batch).ValueOr(-1);
    if (used < 0) return -1;
    // Bytes that arrived in the same buffers are held in memory with it, so they count.
    return std::max(used, arrow::util::TotalBufferSize(*batch));
  }

  // Checks what Python cannot print: it decodes names as UTF-8, and an error has the whole type.
  static Status CheckFields(const arrow::FieldVector& fields, int* left) {
    for (const auto& field : fields) {
      if (--*left < 0) return Status::Invalid("a schema must have at most ", kMaxFields, " fields");
      if (field->name().size() > kMaxNameBytes || !arrow::util::ValidateUTF8(field->name()))
        return Status::Invalid("names of columns must be UTF-8 of at most ", kMaxNameBytes, " bytes");
      const auto* type = field->type().get();
      while (type->id() == arrow::Type::DICTIONARY)
        type = static_cast<const arrow::DictionaryType*>(type)->value_type().get();
      ARROW_RETURN_NOT_OK(CheckFields(type->fields(), left));
    }
    return Status::OK();
  }

  Status Malformed(const char* what, const Status& status) {
    Refusal refusal;
    bool is_too_large = status.IsCapacityError();
    std::string text = is_too_large ? status.message() : what + status.message();
    hooks_.on_malformed(hooks_.python, text, is_too_large, &refusal);
    return refusal.ToStatus();
  }

  std::shared_ptr<BatchQueue> queue_;
  const Hooks hooks_;
  std::shared_ptr<arrow::Schema> rows_schema_;
  const int max_batches_;
  const int64_t max_bytes_;
  bool is_bounded_ = false;
};

}  // namespace polybus
