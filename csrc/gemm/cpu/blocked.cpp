// The blocked product (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS 34(3),
// 2008), over the micro-kernels of one instruction set.
//
// Work: 2 M N K flops at the rate of the multiply-adds. A thread takes a block of columns of b, packs it once into
// panels, and goes down the rows, kRowUnit at a time, which it reads in place if the kernel can. These rows by one
// panel are summed depth after depth of K, so that a depth of the panel stays in the L1 cache. After a few panels
// `finish` gets their sums from the cache.
//
// The order of an element's sum over K is fixed for all other sizes and numbers of threads.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "gemm/cpu/product.h"

namespace ak {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// Memory of a thread that grows and is kept: fresh pages would cost as much as the packing.
class Scratch {
 public:
  template <typename T>
  T* of(int64_t count) {
    const size_t bytes = static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
    if (bytes > size_) {
      memory_.reset();
      memory_.reset(std::aligned_alloc(64, bytes));
      size_ = memory_ ? bytes : 0;
      if (!memory_) throw std::bad_alloc();
    }
    return static_cast<T*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t size_ = 0;
};

// Columns, and steps of K, of b that are packed at a time: up to 1.5 MB, streamed from the L2 or L3 cache.
struct Blocking {
  int64_t columns, steps;
};
constexpr Blocking kRowsInPlace{192, 2048};
// Packed rows are packed again for each block of columns, so blocks are wide.
constexpr Blocking kRowsPacked{768, 512};
// A kernel that asks for more columns than kRowsInPlace gets as many as the L2 cache holds: 1 MB.
constexpr int64_t kWordsInPlace = 256 << 10;
// Columns of a unit of rows that are finished together: 48 KB of sums in the L1 or L2 cache.
constexpr int64_t kPieceColumns = 192;
// For a longer K, units of rows that are summed together before b is packed again for the next ones.
constexpr int64_t kUnitsTogether = 16;
// Least work of a thread, some 10 us: below it, waking another costs more.
constexpr int64_t kFlopsPerThread = 4 << 20;

// The words of a block of rows of `a`, in panels of a power of two of lanes.
struct Rows {
  Words first;
  int64_t lanes_log2, panel_bytes;

  Words from(int64_t row, int64_t step) const {
    const int64_t panel = row >> lanes_log2, lane = row - (panel << lanes_log2);
    return {first.data + panel * panel_bytes + lane * first.lane_bytes + step * first.step_bytes, first.lane_bytes,
            first.step_bytes};
  }
};

class Product {
 public:
  Product(const Kernel& kernel, const BlockedProblem& problem, const Finish& finish)
      : kernel_(kernel),
        p_(problem),
        finish_(finish),
        steps_(round_up(problem.k, kernel.group) / kernel.word_elements),
        columns_(problem.n / problem.halves),
        row_blocks_(divide_up(problem.m, kRowUnit)),
        in_place_(kernel.in_place && problem.a.matrix.k_stride == 1 && problem.k % kernel.group == 0),
        blocking_(in_place_ ? in_place_blocking() : kRowsPacked) {
    // As many columns as fit the caches, but a few tasks per thread; the same number of blocks for each thread, if
    // possible, so that no block is packed twice.
    const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), flops() / kFlopsPerThread + 1);
    const int64_t least = divide_up(2 * threads, p_.batches * row_blocks_);
    const int64_t blocks = std::max({least, divide_up(columns_, blocking_.columns / p_.halves),
                                     std::min(threads, divide_up(columns_, kRowsInPlace.columns / p_.halves))});
    const int64_t even = blocks < threads ? blocks : round_up(blocks, threads);
    const int64_t lanes = threads > 1 ? int64_t{1} << kernel.lanes_log2 : kernel.columns;
    block_columns_ = round_up(divide_up(columns_, even), lanes);
    column_blocks_ = divide_up(columns_, block_columns_);
    block_room_ = round_up(block_columns_, kernel.columns);
    // The sums of all columns wait for the last chunk of K.
    piece_columns_ = steps_ > blocking_.steps
                         ? block_room_
                         : kernel.columns * std::max<int64_t>(1, kPieceColumns / p_.halves / kernel.columns);
  }

  void run() const {
    // Cut by columns, not by tasks: those of the last block are smaller.
    const int64_t columns = p_.batches * row_blocks_ * columns_;
    const int64_t grain = std::max<int64_t>(1, columns * kFlopsPerThread / flops());
    torch::stable::parallel_for(0, columns, grain,
                                [this](int64_t begin, int64_t end) { work(first_task(begin), first_task(end)); });
  }

 private:
  Blocking in_place_blocking() const {
    const int64_t fit = kWordsInPlace / std::max<int64_t>(1, steps_);
    return {std::clamp(fit, kRowsInPlace.columns, kernel_.most_columns), kRowsInPlace.steps};
  }

  int64_t flops() const { return 2 * p_.batches * p_.m * p_.n * std::max<int64_t>(1, p_.k); }

  int64_t width() const { return p_.halves * piece_columns_; }

  // The first task that begins with this column or a later one, where the columns of all tasks are counted.
  int64_t first_task(int64_t column) const {
    const int64_t batch = column / (row_blocks_ * columns_), rest = column % (row_blocks_ * columns_);
    const int64_t block = batch * column_blocks_ + rest / (row_blocks_ * block_columns_);
    return block * row_blocks_ + divide_up(rest % (row_blocks_ * block_columns_), columns_of(block));
  }

  // Some columns of a unit of rows, and where their sums are.
  struct Piece {
    int64_t block, unit, column, columns;
    float* sums;
  };

  // A task is a unit of rows by a block of columns; those of one block of columns follow each other.
  void work(int64_t begin, int64_t end) const {
    thread_local Scratch panels_scratch, rows_scratch, sums_scratch;
    const int64_t chunk = std::min(steps_, blocking_.steps), together = steps_ > chunk ? kUnitsTogether : 1;
    uint32_t* panels = panels_scratch.of<uint32_t>(p_.halves * block_room_ * chunk);
    uint32_t* packed_rows = in_place_ ? nullptr : rows_scratch.of<uint32_t>(kRowUnit * chunk);
    float* sums = sums_scratch.of<float>(std::min(together, end - begin) * kRowUnit * width());
    int64_t packed_block = -1;
    if (kernel_.begin) kernel_.begin();
    for (int64_t task = begin; task < end;) {
      const int64_t block = task / row_blocks_, unit = task % row_blocks_;
      const int64_t units = std::min({together, end - task, row_blocks_ - unit}), columns = columns_of(block);
      int64_t step = 0;
      do {
        const int64_t steps = std::min(chunk, steps_ - step);
        if (block != packed_block || steps < steps_) pack_columns(block, step, steps, panels);
        packed_block = block;
        for (int64_t i = 0; i < units; ++i) {
          const Rows rows = pack_rows(block, unit + i, step, steps, packed_rows);
          for (int64_t column = 0; column < columns; column += piece_columns_) {
            const Piece piece{block, unit + i, column, std::min(piece_columns_, columns - column),
                              sums + i * kRowUnit * width()};
            multiply(piece, rows, step, steps, panels);
            if (step + steps == steps_) finish(piece);
          }
        }
        step += steps;
      } while (step < steps_);  // once for K = 0, whose sums are 0
      task += units;
    }
    if (kernel_.end) kernel_.end();
  }

  int64_t first_column(int64_t block) const { return block % column_blocks_ * block_columns_; }
  int64_t columns_of(int64_t block) const { return std::min(block_columns_, columns_ - first_column(block)); }
  int64_t rows_of(int64_t unit) const { return std::min(kRowUnit, p_.m - unit * kRowUnit); }

  // Elements of K in `steps` steps from `step` on; the last one may be padded.
  int64_t elements(int64_t step, int64_t steps) const {
    return std::min(p_.k, (step + steps) * kernel_.word_elements) - std::min(p_.k, step * kernel_.word_elements);
  }

  void pack_columns(int64_t block, int64_t step, int64_t steps, uint32_t* panels) const {
    const Operand b = p_.b.of(block / column_blocks_);
    for (int64_t half = 0; half < p_.halves; ++half)
      kernel_.pack_panels(b.at(half * columns_ + first_column(block), step * kernel_.word_elements), columns_of(block),
                          elements(step, steps), steps, kernel_.columns, panels + half * block_room_ * steps);
  }

  Rows pack_rows(int64_t block, int64_t unit, int64_t step, int64_t steps, uint32_t* packed) const {
    const Operand a = p_.a.of(block / column_blocks_).at(unit * kRowUnit, step * kernel_.word_elements);
    if (in_place_) return {{reinterpret_cast<const char*>(a.data), 2 * a.lane_stride, 4}, kRowUnitLog2, 0};
    const char* data = reinterpret_cast<const char*>(packed);
    if (kernel_.packs_rows || a.k_stride == 1) {
      kernel_.pack_rows(a, rows_of(unit), elements(step, steps), steps, packed);
      return {{data, 4 * steps, 4}, kRowUnitLog2, 0};
    }
    const int64_t lanes = 1 << kernel_.lanes_log2;
    kernel_.pack_panels(a, rows_of(unit), elements(step, steps), steps, lanes, packed);
    return {{data, 4, 4 * lanes}, kernel_.lanes_log2, 4 * lanes * steps};
  }

  // The sums of a piece (+)= `steps` of a and b. A depth of a panel stays in the L1 cache.
  void multiply(const Piece& piece, const Rows& a, int64_t step, int64_t steps, const uint32_t* panels) const {
    const int64_t rows = rows_of(piece.unit), depth = kernel_.depth / kernel_.word_elements;
    for (int64_t half = 0; half < p_.halves; ++half) {
      for (int64_t column = 0; column < piece.columns; column += kernel_.columns) {
        const uint32_t* panel = panels + (half * block_room_ + piece.column + column) * steps;
        float* sums = piece.sums + half * piece_columns_ + column;
        int64_t p = 0;
        do {
          const int64_t some = std::min(depth, steps - p);
          for (int64_t row = 0; row < rows; row += kernel_.rows)
            kernel_.multiply(some, a.from(row, p), panel + p * kernel_.columns, sums + row * width(), width(),
                             std::min(kernel_.rows, rows - row), std::min(kernel_.columns, piece.columns - column),
                             step + p > 0);
          p += some;
        } while (p < steps);
      }
    }
  }

  void finish(const Piece& piece) const {
    const int64_t batch = piece.block / column_blocks_;
    finish_({.sums = piece.sums,
             .stride = width(),
             .half = p_.halves == 2 ? piece_columns_ : 0,
             .row = batch * p_.m + piece.unit * kRowUnit,
             .rows = rows_of(piece.unit),
             .column = first_column(piece.block) + piece.column,
             .columns = piece.columns,
             .unit = batch * row_blocks_ + piece.unit});
  }

  const Kernel& kernel_;
  const BlockedProblem& p_;
  const Finish& finish_;
  const int64_t steps_;       // of all of K
  const int64_t columns_;     // of a half
  const int64_t row_blocks_;  // of one matrix
  const bool in_place_;       // rows of `a` are read in place
  const Blocking blocking_;
  int64_t block_columns_, column_blocks_;  // of a half
  int64_t block_room_;                     // its columns in whole panels
  int64_t piece_columns_;                  // of a half, whose sums are finished together
};

// ---- thin products, of few rows or columns, such as those of a model that generates one token at a time: dot products
// over the memory of the large operand, whose K is contiguous.
//
// Work: the bytes of the large operand, each read once; the small one is packed and stays in the L1 or L2 cache. A few
// lanes of the large one at a time go through the L1 cache and meet all vectors of the small one. An element is summed
// in the lanes of one register, then over these, for any number of threads.

// Lanes of the large operand that are finished together: a unit of rows, if they are rows.
constexpr int64_t kLanesTogether = kRowUnit;
// Least elements that a thread reads, some 10 us.
constexpr int64_t kElementsPerThread = 128 << 10;

bool few_rows(const BlockedProblem& p) { return p.m <= kThin && p.b.matrix.k_stride == 1; }
bool few_columns(const BlockedProblem& p) { return p.n <= kThin && p.a.matrix.k_stride == 1 && p.halves == 1; }

}  // namespace

void blocked_product(const Kernel& kernel, const BlockedProblem& problem, const Finish& finish) {
  Product(kernel, problem, finish).run();
}

bool is_thin(const BlockedProblem& problem) { return few_rows(problem) || few_columns(problem); }

void thin_product(const Kernel& kernel, const BlockedProblem& p, const Finish& finish) {
  const bool by_rows = few_rows(p);
  const BatchedOperand& few = by_rows ? p.a : p.b;
  const BatchedOperand& many = by_rows ? p.b : p.a;
  const int64_t few_lanes = by_rows ? p.m : p.n, many_lanes = by_rows ? p.n / p.halves : p.m;
  const int64_t steps = round_up(divide_up(p.k, kernel.word_elements), 1 << kernel.lanes_log2);
  const int64_t blocks = divide_up(many_lanes, kLanesTogether), width = p.halves * kLanesTogether;
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / (width * std::max<int64_t>(1, p.k)));
  torch::stable::parallel_for(0, p.batches * blocks, grain, [&](int64_t begin, int64_t end) {
    thread_local Scratch packed_scratch;
    uint32_t* packed = packed_scratch.of<uint32_t>(kThin * steps);
    float sums[kThin * 2 * kLanesTogether];
    int64_t packed_batch = -1;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t batch = task / blocks, first = task % blocks * kLanesTogether;
      const int64_t lanes = std::min(kLanesTogether, many_lanes - first);
      if (batch != packed_batch) kernel.pack_rows(few.of(batch), few_lanes, p.k, steps, packed);
      packed_batch = batch;
      for (int64_t half = 0; half < p.halves; ++half)
        kernel.dot(p.k, packed, steps, few_lanes, many.of(batch).at(half * many_lanes + first, 0), lanes,
                   sums + half * kLanesTogether, by_rows ? width : 1, by_rows ? 1 : p.n);
      finish({.sums = sums,
              .stride = by_rows ? width : p.n,
              .half = p.halves == 2 ? kLanesTogether : 0,
              .row = batch * p.m + (by_rows ? 0 : first),
              .rows = by_rows ? p.m : lanes,
              .column = by_rows ? first : 0,
              .columns = by_rows ? lanes : p.n,
              .unit = by_rows ? batch : task});
    }
  });
}

}  // namespace ak
