// Times every tile of gemm_sm90 that takes a product. tiles.py compiles it, feeds it, and keeps what it prints.
//
// A line of standard input is a product: m n k layout result epilogue batch, as in the first columns of gemm_tiles.csv.
// A line of standard output is a whole row of that file. Arguments: seconds to spend, and milliseconds of a sample.
//
// Operands are random and change from launch to launch, so that none is found in L2. The launches of a sample are one
// CUDA graph, which hides the host; a row is the median of three samples. Every product goes through the tiles twice,
// there and back, since the first ones find a cooler GPU; tiles.py keeps the lesser time.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "activation/name.h"
#include "gemm/sm90/gemm.h"

namespace {

using namespace ak;

constexpr size_t kL2 = size_t{240} << 20;  // bytes of operands that take turns: four times an H200's L2

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check(call, #call)

struct Product {
  int m, n, k, batch;
  std::string layout, result, epilogue;
};

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

/// The epilogue of a name in gemm_tiles.csv.
struct Epilogue {
  bool bias = true, residual = false, z = false, backward = false, sums = false;
  Activation activation = Activation::none;

  explicit Epilogue(std::string name) {
    if (name == "none" || name == "res") bias = false;
    residual = name == "res" || name == "biasres";
    if (residual || name == "none" || name == "bias") return;
    const auto take = [&](const char* end, bool& flag) {
      flag = ends_with(name, end);
      if (flag) name.resize(name.size() - std::string(end).size());
    };
    bool no_bias = false;
    take("_z", z), take("_s", sums), take("_nb", no_bias);
    backward = name[0] == 'd';
    bias = !no_bias && !backward;
    const auto named = find_activation(backward ? name.substr(1) : name);
    if (!named) check(cudaErrorInvalidValue, ("epilogue " + name).c_str());
    activation = *named;
  }
};

/// Device memory that starts with random bits of bf16 in [-1, 1).
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) {
    CHECK(cudaMalloc(reinterpret_cast<void**>(&data_), bytes));
    std::vector<uint16_t> some(std::min<size_t>(bytes / 2, 4 << 20));
    std::minstd_rand random;
    for (uint16_t& x : some) {
      const float value = static_cast<float>(random() % 65536) / 32768 - 1;
      uint32_t bits;
      std::copy_n(reinterpret_cast<const char*>(&value), 4, reinterpret_cast<char*>(&bits));
      x = static_cast<uint16_t>(bits >> 16);
    }
    size_t filled = some.size() * 2;
    CHECK(cudaMemcpy(data_, some.data(), filled, cudaMemcpyDefault));
    for (; filled < bytes; filled *= 2)
      CHECK(cudaMemcpy(data_ + filled, data_, std::min(filled, bytes - filled), cudaMemcpyDefault));
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;

  void restart() { used_ = 0; }
  /// The next piece, aligned to 1,024 bytes.
  char* take(size_t bytes) {
    char* piece = data_ + used_;
    used_ += (bytes + 1023) / 1024 * 1024;
    if (used_ > bytes_) check(cudaErrorMemoryAllocation, "operands");
    return piece;
  }

 private:
  char* data_ = nullptr;
  size_t bytes_, used_ = 0;
};

GemmProblem problem_of(const Product& p, Memory& memory, float* sums) {
  const Epilogue asked(p.epilogue);
  GemmProblem q{};
  q.m = p.m, q.n = p.n, q.k = p.k, q.batch = p.batch;
  q.m_major_a = p.layout[0] == 'T', q.n_major_b = p.layout[1] == 'N';
  q.ld_a = q.m_major_a ? p.m : p.k, q.ld_b = q.n_major_b ? p.n : p.k;
  q.batch_stride_a = int64_t{p.m} * p.k, q.batch_stride_b = int64_t{p.n} * p.k;
  GemmEpilogue& e = q.epilogue;
  e.activation = asked.activation;
  const auto matrix = [&](int columns, DType type) {
    const int64_t elements = int64_t{p.m} * columns;
    return GemmValues{memory.take(elements * p.batch * bytes_of(type)), type, columns, 1, elements};
  };
  if (asked.backward) e.preact = matrix(is_gated(e.activation) ? 2 * p.n : p.n, DType::kBFloat16);
  if (asked.residual) e.residual = matrix(p.n, DType::kBFloat16);
  if (asked.z) e.z = matrix(p.n, DType::kBFloat16);
  if (asked.bias) e.bias = {memory.take(size_t{2} * p.n), DType::kBFloat16, 0, 1, 0};
  if (asked.sums) e.column_sums = sums;
  q.c = matrix(columns_of_c(q), p.result == "16" ? DType::kBFloat16 : DType::kFloat32);
  q.accumulate = p.result != "16" && p.result != "fp32";
  q.a = memory.take(size_t{2} * p.m * p.k * p.batch);
  q.b = memory.take(size_t{2} * p.n * p.k * p.batch);
  return q;
}

class Sweep {
 public:
  Sweep(double seconds, double sample_ms) : seconds_(seconds), sample_ms_(sample_ms) {
    CHECK(cudaStreamCreate(&stream_));
    CHECK(cudaEventCreate(&begin_));
    CHECK(cudaEventCreate(&end_));
    size_t available = 0, total = 0;
    CHECK(cudaMemGetInfo(&available, &total));
    operands_.emplace(available / 2);
    partials_.emplace(available / 8);
    sums_.emplace(available / 16);
    partials_bytes_ = available / 8;
    CHECK(cudaMalloc(reinterpret_cast<void**>(&counters_), kCounters * 4));
    CHECK(cudaMemset(counters_, 0, kCounters * 4));
    CHECK(cudaDeviceGetAttribute(&sm_count_, cudaDevAttrMultiProcessorCount, 0));
  }

  void run(const Product& p) {
    problems_.clear();
    operands_->restart(), sums_->restart();
    float* sums = reinterpret_cast<float*>(sums_->take(0));
    const size_t bytes = size_t{2} * p.k * (p.m + p.n) * p.batch + size_t{4} * p.m * p.n * p.batch;
    for (size_t i = 0; i < std::clamp<size_t>(kL2 / bytes + 1, 1, 16); i++)
      problems_.push_back(problem_of(p, *operands_, sums));
    for (int pass = 0; pass < 2; pass++) {
      for (int i = 0; i < kGemmTileCount; i++) tile(p, pass == 0 ? i : kGemmTileCount - 1 - i);
    }
  }

 private:
  static constexpr size_t kCounters = 1 << 20;

  void tile(const Product& p, int number) {
    for (int splits : {1, 2, 3, 4, 6, 8, 12, 16, 32}) {
      for (bool swapped : {false, true}) {
        const GemmSm90Config config{number, splits, swapped};
        if (spent_ > seconds_ || !sensible(config)) continue;
        const GemmTile& t = kGemmTiles[number];
        const double us = time(config);
        std::printf("%d,%d,%d,%s,%s,%s,%d,%dx%d %dx%d%s,%d,%d,%.2f\n", p.m, p.n, p.k, p.layout.c_str(),
                    p.result.c_str(), p.epilogue.c_str(), p.batch, t.m, t.n, t.cluster_m, t.cluster_n,
                    t.pingpong ? " pingpong" : "", splits, static_cast<int>(swapped), us);
        std::fflush(stdout);
      }
    }
  }

  /// True if the kernel takes it and the planner may ask for it.
  bool sensible(const GemmSm90Config& config) const {
    const GemmProblem& q = problems_[0];
    if (config.swapped && q.m > 64) return false;
    if (config.splits > 1 && (q.k / 64 / config.splits < 4 || gemm_sm90_splits(q.k, config.splits) != config.splits))
      return false;
    if (gemm_sm90_refuses(q, config)) return false;
    const GemmTile& t = kGemmTiles[config.tile];
    if (!gemm_sm90_takes_epilogue(t) && !gemm_sm90_in_registers(q)) return false;
    const int64_t blocks = gemm_sm90_clusters(config.swapped ? ak::swapped(q) : q, t) * t.cluster_m * t.cluster_n;
    if (config.splits > 1 && blocks * q.batch * config.splits > 2 * sm_count_) return false;
    if (t.m * t.n <= 64 * 64 && blocks * q.batch > 24 * sm_count_) return false;  // hopeless
    const GemmScratchSize need = gemm_sm90_scratch(q, config);
    return need.partials * 4 <= partials_bytes_ && need.counters <= kCounters;
  }

  void launch(const GemmSm90Config& config, int number) {
    partials_->restart();
    const GemmScratch scratch{reinterpret_cast<float*>(partials_->take(0)), counters_};
    const GemmProblem& q = problems_[static_cast<size_t>(number) % problems_.size()];
    const Status status = gemm_sm90<bf16>(q, config, scratch, stream_);
    if (status.ok()) return;
    std::fprintf(stderr, "gemm_sm90: %s\n", status.message);
    std::exit(1);
  }

  /// Microseconds of a launch.
  double time(const GemmSm90Config& config) {
    const int all = static_cast<int>(problems_.size());
    const auto launches = [&](int count) {
      for (int i = 0; i < count; i++) launch(config, i);
    };
    while (!warm_) warm_ = (warm_ms_ += elapsed([&] { launches(all); })) > 1500;
    elapsed([&] { launches(1); });
    const double ms = elapsed([&] { launches(all); }) / all;
    const int count = static_cast<int>(std::clamp(sample_ms_ / ms, 3.0, 400.0));
    cudaGraph_t graph;
    cudaGraphExec_t runnable;
    CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    launches(count);
    CHECK(cudaStreamEndCapture(stream_, &graph));
    CHECK(cudaGraphInstantiate(&runnable, graph, 0));
    double samples[3];
    for (double& sample : samples) sample = elapsed([&] { CHECK(cudaGraphLaunch(runnable, stream_)); }) / count;
    CHECK(cudaGraphExecDestroy(runnable));
    CHECK(cudaGraphDestroy(graph));
    std::sort(samples, samples + 3);
    return samples[1] * 1e3;
  }

  template <class F>
  double elapsed(const F& work) {
    CHECK(cudaEventRecord(begin_, stream_));
    work();
    CHECK(cudaEventRecord(end_, stream_));
    CHECK(cudaEventSynchronize(end_));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin_, end_));
    spent_ += ms / 1e3;
    return ms;
  }

  double seconds_, sample_ms_, spent_ = 0, warm_ms_ = 0;
  bool warm_ = false;
  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
  std::optional<Memory> operands_, partials_, sums_;
  size_t partials_bytes_ = 0;
  uint32_t* counters_ = nullptr;
  int sm_count_ = 0;
  std::vector<GemmProblem> problems_;
};

}  // namespace

int main(int count, char** arguments) {
  Sweep sweep(count > 1 ? std::atof(arguments[1]) : 60, count > 2 ? std::atof(arguments[2]) : 6);
  for (std::string line; std::getline(std::cin, line);) {
    Product p;
    std::istringstream words(line);
    if (words >> p.m >> p.n >> p.k >> p.layout >> p.result >> p.epilogue >> p.batch) sweep.run(p);
  }
}
