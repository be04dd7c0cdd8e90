"""Bugs in the rows of tokens on their way to groups and back."""

from . import Mutant

TEST = "test_routing"
KERNEL = "routing/rows.cu"

MUTANTS = [
    # ---- both
    Mutant(KERNEL, "if (j < left) piece[j] = load", "piece[j] = load", "columns past the last one are read"),
    Mutant(KERNEL, "if (j < left) store<kCache>(to + j", "store<kCache>(to + j", "columns past the last one are written"),
    Mutant(KERNEL, "r.columns % kRouteColumns == 0 &&", "", "the last vector of a row goes into the next row"),
    Mutant(KERNEL, "&& std::all_of(matrices.begin(), matrices.end(), vector_aligned)", "", "vectors at odd addresses"),
    # ---- spread
    Mutant(KERNEL, "if (row >= r.rows()) return;", "", "warps past the last choice"),
    Mutant(KERNEL, "place >= 0 && place < r.rows()", "place < r.rows()", "a negative place"),
    Mutant(KERNEL, "place >= 0 && place < r.rows()", "place >= 0", "a place past the last row"),
    Mutant(KERNEL, "load(r.weights + row)", "load(r.weights + row / r.top_k)", "the weight of the first choices for all"),
    Mutant(KERNEL, "r.weights != nullptr ? load(r.weights + row) : 1.0f", "load(r.weights + row)", "weights that are not there"),
    Mutant(KERNEL, "int64_t{row / r.top_k} * r.columns", "row % r.tokens * r.columns", "choices and tokens exchanged"),
    Mutant(KERNEL, "static_cast<Out*>(p.out) + place * r.columns", "static_cast<Out*>(p.out) + row * r.columns", "no row moves"),
    Mutant(KERNEL, "static_cast<const Out*>(p.y) + place * r.columns", "static_cast<const Out*>(p.y) + row * r.columns",
           "a token times the row of another"),
    Mutant(KERNEL, "first += kInFlight * kPieceColumns", "first += kPieceColumns", "pieces count twice"),
    Mutant(KERNEL, "dot += to_float(of_x[i][j]) * to_float(of_y[i][j]);", "dot += weight * to_float(of_x[i][j]) * to_float(of_y[i][j]);",
           "the gradient of a weight has the weight in it"),
    Mutant(KERNEL, "dot = warp_sum(dot);", "", "the products of one lane"),
    Mutant(KERNEL, "store(p.dots + row, dot)", "store(p.dots + place, dot)", "the gradients in the order of the rows"),
    Mutant(KERNEL, "values[j] = weight * to_float(of_x[i][j]);", "values[j] = to_float(of_x[i][j]);", "no weights"),
    # ---- combine
    Mutant(KERNEL, "if (token >= r.tokens || left <= 0) return;", "if (left <= 0) return;", "warps past the last token"),
    Mutant(KERNEL, "if (token >= r.tokens || left <= 0) return;", "if (token >= r.tokens) return;", "lanes past the last column"),
    Mutant(KERNEL, "const bool chosen = first + i < r.top_k;", "const bool chosen = true;", "choices of the next token"),
    Mutant(KERNEL, "place[i] = chosen ? load(r.places + choice) : -1;", "place[i] = chosen ? load(r.places + choice) : 0;", "the first row counts again"),
    Mutant(KERNEL, "if (place[i] >= r.rows()) place[i] = -1;", "", "a place past the last row"),
    Mutant(KERNEL, "if (place[i] < 0) continue;", "if (place[i] < 0) break;", "nothing is added after a place that does not exist"),
    Mutant(KERNEL, "sum[j] += weight[i] * to_float(of_y[i][j]);", "sum[j] = fma(weight[i], to_float(of_y[i][j]), sum[j]);", "one rounding instead of two"),
    Mutant(KERNEL, "for (int i = 0; i < kInFlight; i++) { if (place[i] < 0) continue;", "for (int i = kInFlight - 1; i >= 0; i--) { if (place[i] < 0) continue;",
           "the choices are added backwards"),
    Mutant(KERNEL, "static_cast<Out*>(p.out) + token * r.columns + column", "static_cast<Out*>(p.out) + token * r.columns", "every piece is stored at the first column"),
    Mutant(KERNEL, "int64_t{grid_warp() % pieces} * kPieceColumns", "int64_t{grid_warp() / pieces} * kPieceColumns", "pieces and tokens exchanged"),
]  # fmt: skip
