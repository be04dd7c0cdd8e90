// spread_rows and combine_rows: from the schema to routing/call.h. Matrices with gaps are made contiguous first.
#include <optional>
#include <tuple>
#include <vector>

#include "base/op_call.h"
#include "routing/call.h"

namespace ak {
namespace {

// A call, and the copies that it reads.
struct RouteCall {
  OpCall target;
  Tensor places, weights;
  Routes routes{};

  // `matrix`: named `name`, with a row for each token, or for each choice.
  RouteCall(const char* op, const char* name, const Tensor& matrix, bool of_tokens, const Tensor& places_in,
            const std::optional<Tensor>& weights_in)
      : target(op, {name}, matrix), places(torch::stable::contiguous(places_in)) {
    check_dtype(op, {name}, matrix, kNarrowDtypes);
    check_dtype(op, {"places"}, places, {ScalarType::Int});
    AK_CHECK(places.dim() == 2 && places.numel() <= INT32_MAX, op,
             ": places must have shape (tokens, choices) and at most ", INT32_MAX, " elements; got ",
             Ints{places.sizes()});
    AK_CHECK(matrix.dim() == 2 && matrix.size(0) == (of_tokens ? places.size(0) : places.numel()), op, ": ", name,
             " must have a row for each ", of_tokens ? "token" : "choice", " of places, ", Ints{places.sizes()},
             "; got shape ", Ints{matrix.sizes()});
    routes = {.places = target.read<int32_t>({"places"}, places),
              .weights = nullptr,
              .tokens = places.size(0),
              .columns = matrix.size(1),
              .top_k = static_cast<int>(places.size(1))};
    if (weights_in) {
      check_dtype(op, {"weights"}, *weights_in, {ScalarType::Float});
      AK_CHECK(same_sizes(*weights_in, places), op, ": weights must have the shape of places, ", Ints{places.sizes()},
               "; got ", Ints{weights_in->sizes()});
      weights = torch::stable::contiguous(*weights_in);
      routes.weights = target.read<float>({"weights"}, weights);
    }
    check_places();
  }

  // The kernels pass over bad ones.
  void check_places() const {
    if (!OpCall::kOnCpu) return;
    std::vector<bool> taken(static_cast<size_t>(routes.rows()));
    for (int64_t i = 0; i < routes.rows(); ++i) {
      const int64_t place = routes.places[i];
      AK_CHECK(place >= 0 && place < routes.rows() && !taken[static_cast<size_t>(place)], target.op(), ": places[",
               i / routes.top_k, ", ", i % routes.top_k, "] is ", place, "; accepted: each number of [0, ",
               routes.rows(), ") once");
      taken[static_cast<size_t>(place)] = true;
    }
  }
};

// `wide` may be fp32 where `narrow` has 16 bits.
void check_types(const char* op, ScalarType wide, ScalarType narrow) {
  AK_CHECK(wide == narrow || (wide == ScalarType::Float && is_half(narrow)), op, ": no kernel takes ", dtype_name(wide),
           " with ", dtype_name(narrow), "; accepted: equal dtypes, or float32 with a 16-bit one");
}

// The second result is undefined without y.
std::tuple<Tensor, Tensor> run_spread_rows(const Tensor& x_in, const Tensor& places,
                                           const std::optional<Tensor> weights, const std::optional<Tensor> y_in,
                                           const std::optional<ScalarType> out_dtype) {
  constexpr const char* op = "spread_rows";
  RouteCall call(op, "x", x_in, true, places, weights);
  const ScalarType type = y_in ? y_in->scalar_type() : out_dtype.value_or(x_in.scalar_type());
  check_dtype(op, {"out_dtype"}, type, kNarrowDtypes);
  check_types(op, x_in.scalar_type(), type);
  const int64_t rows = call.routes.rows(), columns = call.routes.columns;
  const Tensor x = torch::stable::contiguous(x_in), out = call.target.empty({"out"}, {rows, columns}, type);
  SpreadRows p{.routes = call.routes,
               .x = call.target.read({"x"}, x),
               .y = nullptr,
               .out = out.mutable_data_ptr(),
               .dots = nullptr,
               .x_type = dtype_of(x.scalar_type()),
               .out_type = dtype_of(type)};
  Tensor y, dots;
  if (y_in) {
    AK_CHECK(y_in->dim() == 2 && y_in->size(0) == rows && y_in->size(1) == columns, op, ": y must have shape (", rows,
             ", ", columns, "); got ", Ints{y_in->sizes()});
    AK_CHECK(out_dtype.value_or(type) == type, op, ": out_dtype must be that of y, ", dtype_name(type));
    y = torch::stable::contiguous(*y_in);
    dots = call.target.empty({"dots"}, places.sizes(), ScalarType::Float);
    p.y = call.target.read({"y"}, y);
    p.dots = static_cast<float*>(dots.mutable_data_ptr());
  }
  if (rows > 0) call.target.launch(spread_rows, p);
  return {out, dots};
}

Tensor run_combine_rows(const Tensor& y_in, const Tensor& places, const std::optional<Tensor> weights,
                        const std::optional<ScalarType> out_dtype) {
  constexpr const char* op = "combine_rows";
  RouteCall call(op, "y", y_in, false, places, weights);
  const ScalarType type = out_dtype.value_or(y_in.scalar_type());
  check_dtype(op, {"out_dtype"}, type, kNarrowDtypes);
  check_types(op, type, y_in.scalar_type());
  const Tensor y = torch::stable::contiguous(y_in),
               out = call.target.empty({"out"}, {call.routes.tokens, call.routes.columns}, type);
  const CombineRows p{.routes = call.routes,
                      .y = call.target.read({"y"}, y),
                      .out = out.mutable_data_ptr(),
                      .y_type = dtype_of(y.scalar_type()),
                      .out_type = dtype_of(type)};
  if (out.numel() > 0) call.target.launch(combine_rows, p);
  return out;
}

}  // namespace
}  // namespace ak

AK_OPS(m) {
  m.impl("spread_rows", TORCH_BOX(&ak::run_spread_rows));
  m.impl("combine_rows", TORCH_BOX(&ak::run_combine_rows));
}
