// Elements beyond 2^32: a place that was counted in 32 bits, signed or not, is one before it. A
// large tensor has only its end, at the address that the kernel works out from that of an element which is nowhere; of
// each grid only the last block runs, which finds its work there. It must give what the same rows give alone, to the
// bit.
#include <sys/mman.h>

#include "activation/backward.cu"
#include "activation/forward.cu"
#include "any_buffer.h"
#include "cast/cast.cu"
#include "column_sums/column_sums.cu"
#include "embedding/accumulate.cu"
#include "emulator/harness.h"
#include "emulator/visible.h"
#include "gemm/column_sums.cu"
#include "loss/cross_entropy.cu"
#include "norm/backward.cu"
#include "norm/forward.cu"

namespace ak::test {
namespace {

constexpr int64_t kFar = int64_t{1} << 32;
constexpr DType kHalf = DType::kFloat16, kBrain = DType::kBFloat16, kFloat = DType::kFloat32;

/// The address of element 0 of a tensor whose element `before` is the first that exists.
template <class T>
T* element_0(T* data, int64_t before) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(data) - before * static_cast<int64_t>(sizeof(T)));
}

/// Tensors of which elements `before` and after exist. Their values depend on the order in which they are asked for.
class Tensors {
 public:
  void* read(const char* name, DType type, int64_t before, int64_t n) {
    AnyBuffer& b = add(name, type, n);
    for (size_t i = 0; i < b.size(); i++) b.set(i, (static_cast<double>(random_.below(257)) - 128) / 64);
    return place_of_0(b, type, before);
  }
  void* write(const char* name, DType type, int64_t before, int64_t n) {
    AnyBuffer& b = add(name, type, n);
    written_.push_back(&b);
    return place_of_0(b, type, before);
  }
  const float* read(const char* name, int64_t before, int64_t n) {
    return static_cast<const float*>(read(name, kFloat, before, n));
  }
  float* write(const char* name, int64_t before, int64_t n) {
    return static_cast<float*>(write(name, kFloat, before, n));
  }
  /// The kernels' results, one tensor after the other.
  std::vector<float> written() const {
    std::vector<float> all;
    for (const AnyBuffer* b : written_) {
      for (size_t i = 0; i < b->size(); i++) all.push_back(b->get(i));
    }
    return all;
  }

 private:
  AnyBuffer& add(const char* name, DType type, int64_t n) {
    buffers_.push_back(std::make_unique<AnyBuffer>(name, type, static_cast<size_t>(n)));
    return *buffers_.back();
  }
  static void* place_of_0(const AnyBuffer& b, DType type, int64_t before) {
    return element_0(static_cast<char*>(b.data()), before * bytes_of(type));
  }

  emu::Random random_{7};
  std::vector<std::unique_ptr<AnyBuffer>> buffers_;
  std::vector<const AnyBuffer*> written_;
};

/// run(tensors, rows before the last) is a Status; it launches grids of as many blocks as the emulated GPU has SMs, or
/// `per_sm` times as many.
template <class Run>
std::string same_far_away(int64_t rows_before, int per_sm, Run run) {
  std::vector<float> results[2];
  for (const int64_t before : {int64_t{0}, rows_before}) {
    emu::options().sm_count = static_cast<int>(before / per_sm) + 1;
    emu::options().last_ctas = before > 0 ? 1 : 0;
    Tensors tensors;
    const std::string error = message_of(run(tensors, before));
    if (!error.empty()) return (before > 0 ? "far away: " : "alone: ") + error;
    results[before > 0] = tensors.written();
  }
  for (size_t i = 0; i < results[0].size(); i++) {
    if (bits_of(results[0][i]) != bits_of(results[1][i]))
      return emu::format("result %zu is %g far away, %g alone", i, results[1][i], results[0][i]);
  }
  return "";
}

/// Rows of `columns` that end beyond kFar elements.
template <class Run>
std::string same_row(int64_t columns, Run run) {
  return same_far_away(kFar / columns + 1, 1, run);
}

// ---- rows; of each kernel a length

void norms(Cases& cases) {
  for (const int columns : {40, 41, 1104, 8208, 16400}) {
    const std::string of = " of " + std::to_string(columns) + " columns";
    const auto forward = [=](bool adds) {
      return same_row(columns, [=](Tensors& t, int64_t before) {
        const int64_t first = before * columns;
        NormForward p{};
        p.x = t.read("x", kHalf, first, columns);
        if (adds) p.residual = t.read("residual", kFloat, first, columns);
        p.weight = t.read("weight", kBrain, 0, columns);
        if (adds) p.sum = t.write("sum", kFloat, first, columns);
        p.y = t.write("y", kBrain, first, columns);
        p.mean = t.write("mean", before, 1);
        p.rstd = t.write("rstd", before, 1);
        p.x_type = kHalf, p.residual_type = kFloat, p.weight_type = p.bias_type = p.y_type = kBrain;
        p.rows = before + 1, p.columns = columns, p.eps = 1e-5f;
        return norm_forward(p, nullptr);
      });
    };
    cases.check("norm_forward" + of, [=] { return forward(false); });
    cases.check("norm_forward, a sum" + of, [=] { return forward(true); });
    const auto gradient = [=](Tensors& t, int64_t before, int parameters) {
      const int64_t first = before * columns;
      NormBackward p{};
      p.grad = t.read("grad", kFloat, first, columns);
      p.x = t.read("x", kBrain, first, columns);
      p.grad_sum = t.read("grad_sum", kFloat, first, columns);
      p.mean = t.read("mean", before, 1);
      p.rstd = t.read("rstd", before, 1);
      p.grad_type = p.grad_sum_type = kFloat, p.x_type = kBrain, p.branch_type = kHalf;
      p.rows = before + 1, p.columns = columns, p.parameters = parameters;
      return p;
    };
    cases.check("norm_backward" + of, [=] {
      return same_row(columns, [=](Tensors& t, int64_t before) {
        NormBackward p = gradient(t, before, 0);
        p.out = t.write("grad_x", kBrain, before * columns, columns);
        p.branch = t.write("branch", kHalf, before * columns, columns);
        if (columns > kRingColumns && columns % kWideRow == 0) {  // a cluster a row
          emu::options().sm_count *= 8;
          if (emu::options().last_ctas > 0) emu::options().last_ctas = columns <= 16384 ? 4 : 8;
        }
        return norm_backward(p, nullptr);
      });
    });
    if (columns <= kRingColumns) continue;
    cases.check("norm_backward's sums" + of, [=] {
      return same_row(columns, [=](Tensors& t, int64_t before) {
        NormBackward p = gradient(t, before, 2);
        p.slots = t.write("slots", before * 2 * columns, 2 * columns);
        const int count = strips<kRingVec>(columns);
        if (emu::options().last_ctas > 0) emu::options().last_ctas = count;
        return strip_sums<kRingVec>(p, p.rows, nullptr);
      });
    });
  }
}

void losses(Cases& cases) {
  for (const int columns : {40, 41, 1104, 20000}) {
    const std::string of = " of " + std::to_string(columns) + " columns";
    cases.check("cross_entropy_rows" + of, [=] {
      return same_row(columns, [=](Tensors& t, int64_t before) {
        CrossEntropyRows p{};
        p.logits = t.read("logits", kBrain, before * columns, columns);
        p.target = t.read("target", kHalf, before * columns, columns);
        p.factor = t.read("factor", before, 1);
        p.loss = t.write("loss", before, 1);
        p.grad = t.write("grad", kBrain, before * columns, columns);
        p.rows = before + 1, p.classes = columns;
        p.logits_stride = p.target_stride = p.grad_stride = columns, p.factor_stride = 1;
        p.ignore_index = -100, p.terms = {1, 0, 0}, p.type = p.grad_type = kBrain;
        p.target_type = kHalf, p.soft = true;
        return cross_entropy_rows(p, nullptr);
      });
    });
  }
}

// ---- elements

/// run(tensors, first, count): elements in 16 bits, of which a thread takes `vector`.
template <class Run>
std::string same_elements(int vector, Run run) {
  const int64_t of_block = int64_t{kElementThreads} * vector;
  return same_far_away(kFar / of_block + 1, 1,
                       [=](Tensors& t, int64_t before) { return run(t, before * of_block, of_block / 2); });
}

void elements(Cases& cases) {
  for (const int vector : {8, 1}) {
    const int odd = vector == 1 ? 1 : 0;  // in front of the elements, which are so not aligned
    const std::string by = ", " + std::to_string(vector) + " at a time";
    cases.check("activation_forward" + by, [=] {
      return same_elements(vector, [=](Tensors& t, int64_t first, int64_t n) {
        const void* z = t.read("z", kHalf, first - odd, n + odd);
        return activation_forward({z, t.write("out", kHalf, first, n), kHalf, 1, first + n, Activation::gelu}, nullptr);
      });
    });
    cases.check("activation_backward" + by, [=] {
      return same_elements(vector, [=](Tensors& t, int64_t first, int64_t n) {
        const void *grad = t.read("grad", kHalf, first - odd, n + odd), *z = t.read("z", kHalf, first, n);
        void* out = t.write("out", kHalf, first, n);
        return activation_backward({grad, z, out, kHalf, kHalf, 1, first + n, Activation::silu}, nullptr);
      });
    });
    const int columns = vector == 1 ? 1 : 64;  // of a gate
    cases.check("swiglu, forward" + by, [=] {
      return same_elements(vector, [=](Tensors& t, int64_t first, int64_t n) {
        const void* z = t.read("z", kBrain, 2 * first, 2 * n);
        void* out = t.write("out", kBrain, first, n);
        return activation_forward({z, out, kBrain, (first + n) / columns, 2 * columns, Activation::swiglu}, nullptr);
      });
    });
    cases.check("swiglu, backward" + by, [=] {
      return same_elements(vector, [=](Tensors& t, int64_t first, int64_t n) {
        const void *grad = t.read("grad", kBrain, first, n), *z = t.read("z", kBrain, 2 * first, 2 * n);
        void* out = t.write("out", kBrain, 2 * first, 2 * n);
        const int64_t rows = (first + n) / columns;
        return activation_backward({grad, z, out, kBrain, kBrain, rows, 2 * columns, Activation::swiglu}, nullptr);
      });
    });
  }
  cases.check("cast", [] {
    return same_far_away(kFar / kUnit + 1, 4, [](Tensors& t, int64_t before) {
      constexpr int64_t kCount = 1001;
      const int64_t first = before * kUnit;
      const void* source = t.read("source", kFloat, first, kCount);
      const CastRef pair{t.write("destination", kBrain, first, kCount), source, first + kCount, kBrain, kFloat};
      return cast({{pair}}, std::nullopt, nullptr, nullptr);
    });
  });
}

// ---- rows of a table

void embeddings(Cases& cases) {
  constexpr int kColumns = 1024;
  // The entries of the last of 1,024 pieces: most of them padding, so that they cost no read, then two rows.
  const auto run = [](int64_t rows, int64_t entries, int64_t grad_row) -> std::string {
    const EmbeddingPieces pieces = embedding_pieces(entries);
    const int64_t first = (pieces.count - 1) * pieces.size, count = entries - first;
    const auto from = static_cast<size_t>(first > 0 ? 1 : 0);  // the kernel looks at the entry before its piece
    emu::Buffer<int64_t> sorted("sorted", from + static_cast<size_t>(count));
    emu::Buffer<int64_t> order("order", static_cast<size_t>(count));
    for (size_t i = 0; i < sorted.size(); i++) sorted.set(i, i + 3 < sorted.size() ? 0 : rows - 1);
    order.fill(grad_row);
    emu::Buffer<float> out("out", kColumns), partial("partial", 1);
    emu::Buffer<bf16> grad("grad", kColumns);
    out.fill(2.0f);
    for (size_t i = 0; i < kColumns; i++) grad.set(i, round_to<bf16>(static_cast<float>(i % 7)));
    EmbeddingAccumulate p{};
    p.out = element_0(out.data(), (rows - 1) * kColumns);
    p.grad = element_0(grad.data(), grad_row * kColumns);
    p.sorted = element_0(sorted.data(), first - static_cast<int64_t>(from));
    p.order = element_0(order.data(), first);
    p.partial = partial.data();
    p.out_type = kFloat, p.grad_type = kBrain;
    p.rows = rows, p.entries = entries, p.columns = kColumns, p.padding_idx = 0;
    emu::options().last_ctas = 1;
    const LaunchConfig config{
        .name = "embedding_pieces", .grid = static_cast<int>(pieces.count), .block = kEmbeddingThreads};
    const std::string error =
        message_of(launch(embedding_pieces_kernel<float, bf16, kEmbeddingThreads, kEmbeddingWide>, config, p, pieces));
    if (!error.empty()) return error;
    for (size_t i = 0; i < kColumns; i++) {
      if (out[i] != 2 + 3 * static_cast<float>(i % 7)) return emu::format("out[%zu] is %g", i, out[i]);
    }
    return "";
  };
  constexpr int64_t kRows = kFar / kColumns + 5;
  cases.check("embedding_accumulate, a row of the table", [=] { return run(kRows, 16, 3); });
  cases.check("embedding_accumulate, a row of the gradient", [=] { return run(9, kRows, kRows - 2); });
}

/// Two rows 2^32 elements apart, in memory of which no other page is touched.
std::string rows_far_apart() {
  constexpr int kColumns = 40;
  constexpr size_t kBytes = (kFar + kColumns) * sizeof(bf16);
  void* const memory =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return "no addresses";
  auto* const x = static_cast<bf16*>(memory);
  std::string wrong;
  {
    emu::VisibleMemory visible;
    for (const int64_t row : {int64_t{0}, kFar}) {
      for (int c = 0; c < kColumns; c++) x[row + c] = round_to<bf16>(static_cast<float>(row == 0 ? c : 2 * c));
      visible.add("x", x + row, kColumns * sizeof(bf16), true, false);
    }
    emu::Buffer<float> sums("sums", kColumns);
    wrong = message_of(column_sums({x, sums.data(), nullptr, DType::kBFloat16, 2, kFar, kColumns}, nullptr));
    for (size_t c = 0; c < kColumns && wrong.empty(); c++) {
      if (sums[c] != 3 * static_cast<float>(c)) wrong = emu::format("column %zu is %g", c, sums[c]);
    }
  }
  munmap(memory, kBytes);
  return wrong;
}

void sums(Cases& cases) { cases.check("column_sums, rows far apart", rows_far_apart); }

}  // namespace
}  // namespace ak::test

int main(int argc, char** argv) {
  using namespace ak::test;
  return check_parts("far_elements", Seeds(argc, argv, 1), {norms, losses, elements, embeddings, sums});
}
