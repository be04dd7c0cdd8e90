// embedding_accumulate_: the gradient of an embedding. Equal indices are adjacent in `sorted`: a run, whose rows of
// `grad` form one sum.
//
// Work: reads grad once, reads and writes the rows that occur, so memory bandwidth is the limit. Plan: a block takes a
// piece of the sorted entries and up to 8 columns a thread, loads four rows before it adds the first, and keeps the sum
// of a run in fp32 registers. A run inside a piece is finished there. A run that crosses pieces leaves a partial sum in
// each, and a second kernel adds those in order. So a word that makes up a tenth of the text burdens no single thread,
// and the order of all additions depends on the number of entries alone, without atomics: the bits never change.
//
// Traps: in a run of three pieces the middle one both continues a run and is continued. Entries of padding_idx are many
// and must cost no read. An index out of range, which the CPU refuses, must not be followed.
#include "embedding/call.h"

#include <type_traits>

#include "base/half.h"
#include "device/launch.cuh"
#include "device/memory.cuh"

namespace ak {
namespace {

constexpr int kEmbeddingWide = 8;  // columns a thread if all rows are aligned; else 1
constexpr int kEmbeddingThreads = 128;
constexpr int kNarrowThreads = 32;
constexpr int kResidentThreads = 640;  // an SM: more would spill

/// Calls f(piece, first column) for this thread's pieces and columns: a persistent grid over pieces and column tiles.
template <int kThreads, int V, class F>
AK_DEVICE void for_each_place(int64_t pieces, int64_t columns, F f) {
  const int64_t tiles = (columns + kThreads * V - 1) / (kThreads * V);
  for (int64_t work = block_index(); work < pieces * tiles; work += grid_blocks()) {
    const int64_t column = (work % tiles * kThreads + thread_index()) * V;
    if (column < columns) f(work / tiles, column);
  }
}

template <class T, int V>
AK_DEVICE void add_to(float (&sum)[V], const Vec<T, V>& row) {
  AK_UNROLL
  for (int j = 0; j < V; j++) sum[j] += to_float(row[j]);
}

/// out[row] += the sum of `count` entries.
template <class Out, int V>
AK_DEVICE void finish_run(const EmbeddingAccumulate& p, int64_t row, int64_t column, const float (&sum)[V],
                          int64_t count) {
  Out* at = static_cast<Out*>(p.out) + row * p.columns + column;
  auto v = load_vec<V>(at);
  AK_UNROLL
  for (int j = 0; j < V; j++) {
    const float mean = p.by_frequency ? div(sum[j], static_cast<float>(count)) : sum[j];
    v[j] = round_to<Out>(to_float(v[j]) + mean);
  }
  store_vec(at, v);
}

AK_DEVICE float* partial_of(const EmbeddingAccumulate& p, int64_t piece, bool continued, int64_t column) {
  return p.partial + (2 * piece + (continued ? 1 : 0)) * p.columns + column;
}

AK_DEVICE bool counts(const EmbeddingAccumulate& p, int64_t row) {
  return row >= 0 && row < p.rows && row != p.padding_idx;
}

template <class Out, class Grad, int V>
AK_DEVICE void add_piece(const EmbeddingAccumulate& p, const EmbeddingPieces& pieces, int64_t piece, int64_t column) {
  constexpr int kInFlight = 4;
  const int64_t begin = piece * pieces.size;
  const int64_t end = begin + pieces.size < p.entries ? begin + pieces.size : p.entries;
  const Grad* grad = static_cast<const Grad*>(p.grad) + column;

  int64_t row = load(p.sorted + begin), first = begin;
  bool begun_before = begin > 0 && load(p.sorted + begin - 1) == row;
  float sum[V] = {};
  const auto leave_run = [&](int64_t run_end, int64_t next) {
    if (counts(p, row)) {
      if (begun_before || next == row) {
        Vec<float, V> v;
        AK_UNROLL
        for (int j = 0; j < V; j++) v[j] = sum[j];
        store_vec(partial_of(p, piece, !begun_before, column), v);
      } else {
        finish_run<Out>(p, row, column, sum, run_end - first);
      }
    }
    AK_UNROLL
    for (int j = 0; j < V; j++) sum[j] = 0.0f;
    row = next;
    first = run_end;
    begun_before = false;
  };

  for (int64_t i = begin; i < end; i += kInFlight) {
    int64_t rows[kInFlight], at[kInFlight];
    Vec<Grad, V> fetched[kInFlight];
    AK_UNROLL
    for (int k = 0; k < kInFlight; k++) {
      const int64_t entry = i + k < end ? i + k : end - 1;
      rows[k] = load(p.sorted + entry);
      at[k] = load(p.order + entry);
    }
    AK_UNROLL
    for (int k = 0; k < kInFlight; k++) {
      const bool reads = counts(p, rows[k]) && at[k] >= 0 && at[k] < p.entries;
      fetched[k] = reads ? load_vec<V, Cache::kStreaming>(grad + at[k] * p.columns) : Vec<Grad, V>{};
    }
    AK_UNROLL
    for (int k = 0; k < kInFlight; k++) {
      if (i + k >= end) break;
      if (rows[k] != row) leave_run(i + k, rows[k]);
      add_to(sum, fetched[k]);
    }
  }
  leave_run(end, end < p.entries ? load(p.sorted + end) : -1);
}

template <class Out, class Grad, int kThreads, int V>
AK_KERNEL(kThreads, kResidentThreads / kThreads)
embedding_pieces_kernel(AK_PARAM(EmbeddingAccumulate) p, EmbeddingPieces pieces) {
  for_each_place<kThreads, V>(pieces.count, p.columns, [&](int64_t piece, int64_t column) {
    add_piece<Out, Grad, V>(p, pieces, piece, column);
  });
}

/// The first entry from `low` on of a row above `row`, of `row` or above if `inclusive`.
AK_DEVICE int64_t first_above(const EmbeddingAccumulate& p, int64_t low, int64_t high, int64_t row, bool inclusive) {
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    const int64_t value = load(p.sorted + middle);
    if (inclusive ? value < row : value <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Finishes the run that begins in a piece and continues past it, if there is one.
template <class Out, int V>
AK_DEVICE void join_pieces(const EmbeddingAccumulate& p, const EmbeddingPieces& pieces, int64_t piece, int64_t column) {
  constexpr int kInFlight = 4;
  const int64_t begin = piece * pieces.size, end = begin + pieces.size;
  if (end >= p.entries) return;
  const int64_t row = load(p.sorted + end);
  if (!counts(p, row) || load(p.sorted + end - 1) != row) return;
  if (begin > 0 && load(p.sorted + begin - 1) == row) return;  // it began before this piece

  const int64_t run_end = first_above(p, end, p.entries, row, false);
  const int64_t last = (run_end - 1) / pieces.size;  // the piece in which it ends
  float sum[V] = {};
  add_to(sum, load_vec<V>(partial_of(p, piece, true, column)));
  for (int64_t next = piece + 1; next <= last; next += kInFlight) {
    Vec<float, V> fetched[kInFlight];
    AK_UNROLL
    for (int k = 0; k < kInFlight; k++) {
      fetched[k] = next + k <= last ? load_vec<V>(partial_of(p, next + k, false, column)) : Vec<float, V>{};
    }
    AK_UNROLL
    for (int k = 0; k < kInFlight; k++) add_to(sum, fetched[k]);
  }
  const int64_t first = p.by_frequency ? first_above(p, begin, end, row, true) : begin;
  finish_run<Out>(p, row, column, sum, run_end - first);
}

template <class Out, int kThreads, int V>
AK_KERNEL(kThreads, kResidentThreads / kThreads)
embedding_joints_kernel(AK_PARAM(EmbeddingAccumulate) p, EmbeddingPieces pieces) {
  for_each_place<kThreads, V>(pieces.count, p.columns,
                              [&](int64_t piece, int64_t column) { join_pieces<Out, V>(p, pieces, piece, column); });
}

/// The runs that begin in a piece, to their ends: entry after entry is added to what `out` holds.
template <class Grad, int V>
AK_DEVICE void add_runs_in_order(const EmbeddingAccumulate& p, const EmbeddingPieces& pieces, int64_t piece,
                                 int64_t column) {
  constexpr int kInFlight = 8;
  const int64_t begin = piece * pieces.size;
  const int64_t end = begin + pieces.size < p.entries ? begin + pieces.size : p.entries;
  const Grad* grad = static_cast<const Grad*>(p.grad) + column;
  int64_t i = begin;
  while (i < end) {
    const int64_t row = load(p.sorted + i);
    const int64_t run_end = first_above(p, i + 1, p.entries, row, false);
    if (counts(p, row) && (i == 0 || load(p.sorted + i - 1) != row)) {
      float* const out = static_cast<float*>(p.out) + row * p.columns + column;
      const auto held = load_vec<V>(out);
      float sum[V];
      AK_UNROLL
      for (int j = 0; j < V; j++) sum[j] = held[j];
      for (int64_t first = i; first < run_end; first += kInFlight) {
        Vec<Grad, V> fetched[kInFlight];
        bool exists[kInFlight];
        AK_UNROLL
        for (int k = 0; k < kInFlight; k++) {
          const int64_t at = first + k < run_end ? load(p.order + first + k) : -1;
          exists[k] = at >= 0 && at < p.entries;
          fetched[k] = exists[k] ? load_vec<V, Cache::kStreaming>(grad + at * p.columns) : Vec<Grad, V>{};
        }
        AK_UNROLL
        for (int k = 0; k < kInFlight; k++) {
          if (exists[k]) add_to(sum, fetched[k]);
        }
      }
      Vec<float, V> total;
      AK_UNROLL
      for (int j = 0; j < V; j++) total[j] = sum[j];
      store_vec(out, total);
    }
    i = run_end;
  }
}

template <class Grad, int kThreads, int V>
AK_KERNEL(kThreads, kResidentThreads / kThreads)
embedding_in_order_kernel(AK_PARAM(EmbeddingAccumulate) p, EmbeddingPieces pieces) {
  for_each_place<kThreads, V>(pieces.count, p.columns, [&](int64_t piece, int64_t column) {
    add_runs_in_order<Grad, V>(p, pieces, piece, column);
  });
}

template <class Out, class Grad, int kThreads, int V>
Status run_embedding(const EmbeddingAccumulate& p, Stream stream) {
  const EmbeddingPieces pieces = embedding_pieces(p.entries);
  const int64_t places = pieces.count * ((p.columns + kThreads * V - 1) / (kThreads * V));
  const int resident = device_sm_count() * (kResidentThreads / kThreads);
  LaunchConfig config{.name = "embedding_pieces",
                      .grid = static_cast<int>(std::min<int64_t>(places, resident)),
                      .block = kThreads,
                      .stream = stream};
  if constexpr (std::is_same_v<Out, float>) {
    if (p.in_order) {
      config.name = "embedding_in_order";
      return launch(embedding_in_order_kernel<Grad, kThreads, V>, config, p, pieces);
    }
  }
  const Status status = launch(embedding_pieces_kernel<Out, Grad, kThreads, V>, config, p, pieces);
  if (!status.ok() || pieces.count == 1) return status;
  config.name = "embedding_joints";
  return launch(embedding_joints_kernel<Out, kThreads, V>, config, p, pieces);
}

template <class Out, class Grad>
Status run_embedding(const EmbeddingAccumulate& p, Stream stream) {
  if (p.columns % kEmbeddingWide || !vector_aligned(p.out) || !vector_aligned(p.grad))
    return run_embedding<Out, Grad, kEmbeddingThreads, 1>(p, stream);
  return p.columns <= kNarrowThreads * kEmbeddingWide
             ? run_embedding<Out, Grad, kNarrowThreads, kEmbeddingWide>(p, stream)
             : run_embedding<Out, Grad, kEmbeddingThreads, kEmbeddingWide>(p, stream);
}

template <class Out>
Status run_embedding(const EmbeddingAccumulate& p, Stream stream) {
  if (p.grad_type == DType::kFloat32) return run_embedding<Out, float>(p, stream);
  return p.grad_type == DType::kBFloat16 ? run_embedding<Out, bf16>(p, stream) : run_embedding<Out, fp16>(p, stream);
}

}  // namespace

Status embedding_accumulate(const EmbeddingAccumulate& p, Stream stream) {
  if (p.entries * p.columns == 0) return {};
  if (p.out_type == DType::kFloat32) return run_embedding<float>(p, stream);
  return p.out_type == DType::kBFloat16 ? run_embedding<bf16>(p, stream) : run_embedding<fp16>(p, stream);
}

}  // namespace ak
