// Instances of gemm_sm90_kernel for symmetric products, and their launch.
//
// Work: n (n + 128) k flops, of which those above the diagonal of a diagonal tile are not used, against 2 or 4 n k
// bytes of operands and 2 n^2 of C, which a residual makes 3 n^2. Plan: square tiles in turns, so that the mirrored
// store of one overlaps the main loop of the next; every k step needs its 32 KB from L2 in the 512 cycles of its wgmma.
// K is never split, so the bits of a matrix do not depend on the batch. Both operands lie alike, which halves the
// instances.
#include "gemm/sm90/gemm.cuh"

namespace ak {
namespace gemm {
namespace {

template <int kStages>
using Triangle = Tile<kGemmSm90Triangle, kGemmSm90Triangle, kStages, 1, 2, true, false, true>;
constexpr int kTwoStages = shared_bytes<false, Triangle<2>>(), kThreeStages = shared_bytes<false, Triangle<3>>();
using SymmetricTile = Triangle<2 + (kSharedLimit - kTwoStages) / (kThreeStages - kTwoStages)>;

const char* refuses(const GemmProblem& q) {
  const GemmEpilogue& e = q.epilogue;
  const auto by = [](int64_t bytes, const GemmValues& t) {
    return t.column_stride == 1 && reinterpret_cast<uintptr_t>(t.data) % bytes == 0 && t.row_stride * 2 % bytes == 0 &&
           t.batch_stride * 2 % bytes == 0;
  };
  if (q.m != q.n || q.m < 1 || q.k < 1 || q.batch < 1) return "gemm_sm90: a symmetric C has m = n rows, at least 1";
  if (!gemm_sm90_reads(q.a, q.ld_a, q.batch_stride_a) || !gemm_sm90_reads(q.b, q.ld_b, q.batch_stride_b))
    return "gemm_sm90: A, B, and the distances between their rows and matrices are multiples of 16 bytes";
  if (q.m_major_a != q.n_major_b) return "gemm_sm90: the operands of a symmetric C lie alike";
  if (q.c.type != q.type || !by(16, q.c) || q.c.row_stride < q.n)
    return "gemm_sm90: a symmetric C has the type of A, and begins at multiples of 16 bytes, as its rows do";
  if (e.residual.data && (e.residual.type != q.type || !by(4, e.residual)))
    return "gemm_sm90: the residual of a symmetric C has its type, and rows that begin at multiples of 4 bytes";
  if (e.activation != Activation::none || e.bias.data || e.z.data || e.preact.data || q.accumulate)
    return "gemm_sm90: a symmetric C takes alpha, a residual and a diagonal";
  if (triangle_of(divide_up(q.m, kGemmSm90Triangle)) * q.batch > INT32_MAX)
    return "gemm_sm90: more tiles than an int counts";
  return nullptr;
}

Schedule triangular_schedule(const GemmProblem& q) {
  Schedule s{};
  s.tile_columns = kGemmSm90Triangle;
  s.lines = divide_up(q.m, kGemmSm90Triangle);
  s.tiles = static_cast<int>(triangle_of(s.lines));
  s.splits = 1;
  s.k_steps = s.k_steps_per_split = divide_up(q.k, kBlockK);
  s.work_count = s.tiles * q.batch;
  s.clusters = divide_up(s.work_count, divide_up(s.work_count, std::max(device_sm_count(), 1)));
  s.batch_a = q.batch_stride_a != 0;
  s.batch_b = q.batch_stride_b != 0;
  return s;
}

template <class T, Major kMajor>
Status launch_symmetric(const GemmProblem& q, Stream stream) {
  TensorMap map_a, map_b, map_c;
  Status status = operand_map<T>(&map_a, q, kMajor, q.a, q.m, q.ld_a, q.batch_stride_a, kGemmSm90Triangle);
  if (status.ok()) status = operand_map<T>(&map_b, q, kMajor, q.b, q.n, q.ld_b, q.batch_stride_b, kGemmSm90Triangle);
  const auto size = [](int64_t x) { return static_cast<uint64_t>(x); };
  const int64_t plane = q.batch == 1 ? q.c.row_stride * q.m : q.c.batch_stride;
  // TMA clips within 16 bytes of a row, so the rows of the map end at a multiple of that.
  if (status.ok())
    status = make_tensor_map(&map_c, {q.c.data,
                                      std::is_same_v<T, bf16> ? ElementType::kBFloat16 : ElementType::kFloat16,
                                      3,
                                      {size(divide_up(q.n, 8)) * 8, size(q.m), size(q.batch)},
                                      {size(q.c.row_stride), size(plane)},
                                      {64, 64, 1}});
  if (!status.ok()) return {status.code, kGemmSm90HasNoMap};
  Args args = arguments<false, SymmetricTile>(q, 1);
  args.path = {DirectStore::kNone, FusedEpilogue::kNone};
  args.schedule = triangular_schedule(q);
  const LaunchConfig config{.name = "gemm_sm90",
                            .grid = args.schedule.clusters,
                            .block = SymmetricTile::kThreads,
                            .shared_bytes = static_cast<std::size_t>(shared_bytes<false, SymmetricTile>()),
                            .overlap_previous = true,
                            .stream = stream};
  return launch(gemm_sm90_kernel<T, kMajor, kMajor, false, SymmetricTile>, config, map_a, map_b, map_c, map_c, map_c,
                args);
}

}  // namespace
}  // namespace gemm

template <class T>
Status gemm_sm90_symmetric(const GemmProblem& q, Stream stream) {
  if (const char* why = gemm::refuses(q)) return {1, why};
  return q.m_major_a ? gemm::launch_symmetric<T, Major::kMN>(q, stream)
                     : gemm::launch_symmetric<T, Major::kK>(q, stream);
}

template Status gemm_sm90_symmetric<fp16>(const GemmProblem&, Stream);
template Status gemm_sm90_symmetric<bf16>(const GemmProblem&, Stream);

}  // namespace ak
