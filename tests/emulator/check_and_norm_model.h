// The results of check_and_norm formed serially, in the order in which its threads, warps and blocks add.
#pragma once
#include "gradients/check_and_norm.cu"
#include "tensor_lists.h"

namespace ak::test {

/// The expected contents of a slot or result, formed without the kernel: the order of additions written down once
/// more, thread after thread. The peak is kept as what it means.
struct Expected {
  double sum = 0;
  double largest = 0;  // NaN if there was one
  bool found = false;

  void join(const Expected& part) {
    sum += part.sum;
    see(part.largest);
    found |= part.found;
  }
  void see(double x) {
    if (!(std::fabs(x) <= largest)) largest = std::isnan(largest) ? largest : std::fabs(x);
  }
  float norm(Norm kind) const { return static_cast<float>(kind == Norm::kLargest ? largest : sum); }
};

inline bool same_bits(double a, double b) { return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b)); }

class Serial {
 public:
  Serial(const std::vector<GradRef>& grads, float inv_scale, int threads, int blocks, int places)
      : grads_(grads), inv_scale_(inv_scale), threads_(threads), blocks_(blocks), places_(places) {}

  /// The slots of all blocks of all launches.
  std::vector<Expected> slots() {
    std::vector<Expected> slots;
    for (const auto& list : launches()) {
      const std::vector<std::vector<Piece>> runs = runs_of(list);
      const size_t blocks = grid_;
      for (size_t b = 0; b < blocks; b++) {
        std::vector<Piece> pieces;
        for (size_t r = b; r < runs.size(); r += blocks) pieces.insert(pieces.end(), runs[r].begin(), runs[r].end());
        slots.push_back(block(list, pieces));
      }
    }
    return slots;
  }
  Expected run() {
    const std::vector<Expected> all = slots();
    std::vector<Expected> per_thread(static_cast<size_t>(threads_));
    for (size_t i = 0; i < all.size(); i++) per_thread[i % per_thread.size()].join(all[i]);
    return tree(per_thread);
  }
  /// The result of each tensor, empty ones included: a warp adds up the blocks that met it.
  std::vector<Expected> per_tensor() {
    std::vector<Expected> results(grads_.size());
    size_t next = 0;
    for (const auto& launch : launches()) {
      const std::vector<std::vector<Piece>> runs = runs_of(launch);
      for (size_t g = 0; g < launch.size(); g++) {
        std::vector<std::vector<Piece>> of_block;  // in the order in which blocks meet the tensor
        size_t met = 0;
        for (const auto& run : runs) {
          for (const Piece& piece : run) {
            if (piece.tensor != g) continue;
            if (of_block.size() < grid_) of_block.emplace_back();
            of_block[met++ % grid_].push_back(piece);
          }
        }
        std::vector<Expected> lanes(32);
        for (size_t i = 0; i < of_block.size(); i++) lanes[i % 32].join(block(launch, of_block[i]));
        while (grads_[next].numel == 0) next++;
        results[next++] = tree(lanes);
      }
    }
    return results;
  }

 private:
  struct Piece {
    size_t tensor;
    int64_t begin, count;
  };

  /// The runs of a launch: units one after the other, as many in each run, or one less in the last ones. Sets the grid:
  /// as few blocks as have no more units than with all of them.
  std::vector<std::vector<Piece>> runs_of(const std::vector<GradRef>& list) {
    std::vector<Piece> units;
    for (size_t g = 0; g < list.size(); g++) {
      for (int64_t begin = 0; begin < list[g].numel; begin += kUnit) {
        units.push_back({g, begin, std::min<int64_t>(kUnit, list[g].numel - begin)});
      }
    }
    size_t of_block = 0;
    while (of_block * static_cast<size_t>(blocks_) < units.size()) of_block++;
    for (grid_ = 1; grid_ * of_block < units.size(); grid_++) {
    }
    size_t rounds = 0;
    while (rounds * kRunUnits < of_block) rounds++;
    std::vector<std::vector<Piece>> runs(grid_ * rounds);
    size_t next = 0;
    for (size_t r = 0; r < runs.size(); r++) {
      const size_t rest = runs.size() - r, count = (units.size() - next + rest - 1) / rest;
      for (const size_t end = next + count; next < end; next++) {
        const Piece& unit = units[next];
        if (!runs[r].empty() && runs[r].back().tensor == unit.tensor) {
          runs[r].back().count += unit.count;
        } else {
          runs[r].push_back(unit);
        }
      }
    }
    return runs;
  }

  std::vector<std::vector<GradRef>> launches() const {
    std::vector<std::vector<GradRef>> result;
    for (const GradRef& g : grads_) {
      if (g.numel == 0) continue;
      if (result.empty() || static_cast<int>(result.back().size()) == places_) result.emplace_back();
      result.back().push_back(g);
    }
    if (result.empty()) result.emplace_back();
    return result;
  }

  /// The slot of a block that reads these pieces.
  Expected block(const std::vector<GradRef>& list, const std::vector<Piece>& pieces) {
    std::vector<Expected> per_thread(static_cast<size_t>(threads_));
    for (const auto& [tensor, begin, count] : pieces) {
      const GradRef& g = list[tensor];
      for (int t = 0; t < threads_; t++) {
        auto& to = per_thread[static_cast<size_t>(t)];
        switch (g.dtype) {
          case DType::kFloat16:
            to.join(share(static_cast<const fp16*>(g.data) + begin, count, t));
            break;
          case DType::kBFloat16:
            to.join(share(static_cast<const bf16*>(g.data) + begin, count, t));
            break;
          case DType::kFloat32:
            to.join(share(static_cast<const float*>(g.data) + begin, count, t));
            break;
          case DType::kFloat64:
            to.join(share(static_cast<const double*>(g.data) + begin, count, t));
            break;
        }
      }
    }
    return tree(per_thread);
  }

  /// Thread t's elements in their order: one of those before the first 16-byte boundary, one of those after the last,
  /// then its vectors.
  template <class T>
  Expected share(const T* p, int64_t count, int t) {
    const int64_t wide = 16 / static_cast<int64_t>(sizeof(T));
    int64_t head = 0;
    while (head < count && reinterpret_cast<uintptr_t>(p + head) % 16 != 0) head++;
    const int64_t tail = head + (count - head) / wide * wide;
    std::vector<int64_t> order;
    if (t < head) order.push_back(t);
    if (tail + t < count) order.push_back(tail + t);
    for (int64_t i = head + t * wide; i < tail; i += threads_ * wide) {
      for (int64_t j = 0; j < wide; j++) order.push_back(i + j);
    }
    Expected result;
    if constexpr (std::is_same_v<T, double>) {
      for (int64_t i : order) {
        const double x = unscale(p[i], inv_scale_);
        result.found |= !(x - x == 0);
        result.see(static_cast<float>(x));
        result.sum += x * x;
      }
    } else {
      float sum = 0, lifted = 0;
      for (int64_t i : order) {
        const float x = unscale(to_float(p[i]), inv_scale_);
        const float y = unscale(to_float(p[i]), inv_scale_ * 0x1p32f);
        result.found |= !(x - x == 0);
        result.see(x);
        sum = fma(x, x, sum);
        lifted = fma(y, y, lifted);
      }
      result.sum = sum < 0x1p-120f && result.largest > 0 ? static_cast<double>(lifted) * 0x1p-64 : sum;
    }
    return result;
  }

  /// Warps add by exchanging with the lane 16, 8, 4, 2, 1 away; the block adds its warps in order.
  Expected tree(std::vector<Expected> x) const {
    for (size_t warp = 0; warp < x.size(); warp += 32) {
      for (size_t step = 16; step > 0; step /= 2) {
        for (size_t lane = 0; lane < step; lane++) x[warp + lane].join(x[warp + lane + step]);
      }
      if (warp > 0) x[0].join(x[warp]);
    }
    return x[0];
  }

  const std::vector<GradRef>& grads_;
  float inv_scale_;
  int threads_, blocks_, places_;
  size_t grid_ = 0;
};

}  // namespace ak::test
