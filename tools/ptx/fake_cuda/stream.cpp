// Streams, events and graphs. Work is done when it is enqueued, which is one of the orders that streams allow; what is
// enqueued on a stream that is being captured is done when its graph is launched.
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "fake.h"

struct CUevent_st {
  int device = fake::current_device;
  fake::Graph* captured = nullptr;
  std::chrono::steady_clock::time_point at;
};
struct CUgraph_st : fake::Graph {};
struct CUgraphExec_st : fake::Graph {};

namespace fake {
namespace {

thread_local std::string last_text = "no error";
thread_local cudaError_t last_code = cudaSuccess;
std::atomic<bool> waits_forbidden = false;
std::mutex counted;
std::vector<Stream*>& destroyed() {
  static std::vector<Stream*> streams;
  return streams;
}
std::map<std::string, int>& call_counts() {
  static std::map<std::string, int> counts;
  return counts;
}

}  // namespace

void count(const char* name) {
  const std::lock_guard lock(counted);
  call_counts()[name]++;
}

cudaError_t wait(const char* name) {
  if (!waits_forbidden) return cudaSuccess;
  return fail(cudaErrorNotPermitted, std::string(name) + " has the host wait for the device");
}

cudaError_t fail(cudaError_t code, const std::string& why) {
  last_text = why;
  last_code = code;
  return code;
}

Stream& stream_of(cudaStream_t stream) {
  static Stream null_streams[kDevices] = {{.device = 0, .id = 0}, {.device = 1, .id = 1}};
  return stream ? *reinterpret_cast<Stream*>(stream) : null_streams[current_device];
}

cudaError_t enqueue(cudaStream_t stream, bool kernel, std::function<cudaError_t()> work) {
  Stream& s = stream_of(stream);
  s.kernel_in_front = kernel;
  if (!s.capturing) return work();
  s.capturing->work.push_back(std::move(work));
  return cudaSuccess;
}

}  // namespace fake

using namespace fake;

FAKE_API int fake_calls(const char* name) {
  const std::lock_guard lock(counted);
  return call_counts()[name];
}
FAKE_API void fake_forbid_waits(int forbidden) { waits_forbidden = forbidden != 0; }
/// The text that cudaGetErrorString gives for a kernel that failed.
FAKE_API void fake_set_error(const char* text) { fail(cudaErrorLaunchFailure, text); }
FAKE_API const char* cudaGetErrorString(cudaError_t code) {
  return code == last_code ? last_text.c_str() : "an error of the fake runtime";
}
FAKE_API const char* cudaGetErrorName(cudaError_t code) { return cudaGetErrorString(code); }
FAKE_API cudaError_t cudaGetLastError() { return std::exchange(last_code, cudaSuccess); }
FAKE_API cudaError_t cudaPeekAtLastError() { return last_code; }

/// A new stream has the handle of the one that was destroyed last, as CUDA may do.
FAKE_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  static unsigned long long ids = kDevices;
  const std::lock_guard lock(counted);
  if (destroyed().empty()) destroyed().push_back(new Stream);
  Stream& created = *destroyed().back();
  destroyed().pop_back();
  created = {.device = current_device, .id = ids++};
  *stream = reinterpret_cast<cudaStream_t>(&created);
  return cudaSuccess;
}
FAKE_API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
FAKE_API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard lock(counted);
  destroyed().push_back(reinterpret_cast<Stream*>(stream));
  return cudaSuccess;
}
FAKE_API cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  return *id = stream_of(stream).id, cudaSuccess;
}
FAKE_API cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
FAKE_API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Graph* captured = stream_of(stream).capturing;
  if (!captured) return wait("cudaStreamSynchronize");
  captured->invalid = true;
  return fail(cudaErrorStreamCaptureUnsupported, "a captured stream cannot be waited for");
}
FAKE_API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }

FAKE_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
FAKE_API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
FAKE_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
FAKE_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (event->device != stream_of(stream).device)
    return fail(cudaErrorInvalidResourceHandle, "an event is recorded in a stream of another device");
  event->captured = stream_of(stream).capturing;
  event->at = std::chrono::steady_clock::now();
  return cudaSuccess;
}
FAKE_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
FAKE_API cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
FAKE_API cudaError_t cudaEventSynchronize(cudaEvent_t) { return wait("cudaEventSynchronize"); }
FAKE_API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  *ms = std::chrono::duration<float, std::milli>(to->at - from->at).count();
  return cudaSuccess;
}
FAKE_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Stream& s = stream_of(stream);
  s.kernel_in_front = false;
  if (event->captured) s.capturing = event->captured;  // the stream joins the capture
  return cudaSuccess;
}

/// Notes work(number) down in a stream that is being captured.
FAKE_API void fake_record(cudaStream_t stream, int (*work)(int), int number) {
  enqueue(stream, stream_of(stream).kernel_in_front,
          [=] { return work(number) ? cudaErrorLaunchFailure : cudaSuccess; });
}

FAKE_API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  Stream& s = stream_of(stream);
  if (!stream) return fail(cudaErrorStreamCaptureUnsupported, "the null stream cannot be captured");
  if (s.capturing) return fail(cudaErrorIllegalState, "the stream is being captured already");
  s.capturing = new CUgraph_st;
  captures++;
  s.kernel_in_front = false;
  return cudaSuccess;
}
FAKE_API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Stream& s = stream_of(stream);
  if (!s.capturing) return fail(cudaErrorIllegalState, "the stream is not being captured");
  *graph = static_cast<CUgraph_st*>(std::exchange(s.capturing, nullptr));
  captures--;
  if (!(*graph)->invalid) return cudaSuccess;
  delete std::exchange(*graph, nullptr);
  return fail(cudaErrorStreamCaptureInvalidated, "the capture was invalidated");
}
FAKE_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = stream_of(stream).capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
FAKE_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                              unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t**,
                                              const cudaGraphEdgeData**, size_t* dependencies) {
  Graph* g = stream_of(stream).capturing;
  if (id) *id = reinterpret_cast<uintptr_t>(g);
  if (graph) *graph = static_cast<CUgraph_st*>(g);
  if (dependencies) *dependencies = 0;
  return cudaStreamIsCapturing(stream, status);
}
FAKE_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode of_thread = cudaStreamCaptureModeGlobal;
  count("cudaThreadExchangeStreamCaptureMode");
  std::swap(of_thread, *mode);
  return cudaSuccess;
}
FAKE_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraphExec_st{*graph};
  return cudaSuccess;
}
FAKE_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  return *count = graph->work.size(), cudaSuccess;
}
FAKE_API cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  return enqueue(stream, false, [exec] {
    for (const auto& work : exec->work) {
      if (const cudaError_t error = work()) return error;
    }
    return cudaSuccess;
  });
}
FAKE_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
FAKE_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}
