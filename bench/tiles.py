"""Times every tile of gemm_sm90 on a GPU: fills `gemm_tiles.csv`.

python -m bench.tiles --out bench/results/nvidia-h200    # compute capability 9.0, nvcc: minutes to compile, minutes to run
python -m bench.tiles --list                             # the products, without a GPU
python -m bench.tiles --only 12544x256x2304 65536x3072x768   # products of these sizes: prints their rows

The planner's model (csrc/gemm/cost.h) is held against the times. `tiles.cpp` is the program that takes them.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from .ops.gemm_shapes import CUDA, Shape
from .prediction.tile_times import FILE, Product, write

HERE = Path(__file__).parent

# Besides the suite's plain products: layers of GPT-2 with what is done to their sums, and corners of the planner.
_GPT2 = Shape(65536, 3072, 768, "NT")
MORE = [
    *(Product(_GPT2, e) for e in ("bias", "relu", "relu_nb", "gelu", "gelu_z", "silu", "res", "biasres")),
    *(Product(Shape(65536, 3072, 768, "NN"), e) for e in ("none", "dgelu", "dgelu_s", "dsilu")),
    Product(Shape(65536, 6144, 768, "NT"), "swiglu"),
    *(Product(Shape(65536, 768, 3072, "NT"), e) for e in ("none", "bias")),
    *(Product(Shape(32768, n, k, "NT"), "bias") for n, k in ((768, 768), (2304, 768), (768, 3072))),
    *(Product(Shape(16448, 4096, 1024, "NT"), e) for e in ("bias", "gelu")),
    *(Product(Shape(8192, 4096, 4096, "NT"), e) for e in ("none", "gelu", "gelu_z")),
    *(Product(Shape(262144, 64, 64, "NT"), e) for e in ("relu", "gelu")),
    *(Product(Shape(m, n, 32768, "TN", "fp32")) for m, n in ((2304, 768), (768, 768), (3072, 768), (768, 3072))),
    Product(Shape(768, 768, 32768, "TN", "fp32+")),
    Product(Shape(32768, 768, 2304, "NN")),
    Product(Shape(768, 3072, 8192, "NN")),
    Product(Shape(32768, 3072, 2048, "NT")),
    Product(Shape(64, 4096, 4096, "NT")),
    Product(Shape(4096, 64, 4096, "NT")),
    Product(Shape(256, 256, 65536, "TN")),
]


def products() -> list[Product]:
    """The timed products: the plain ones of `gemm_shapes` that TMA takes as they are, and MORE."""
    suite = [s for s in CUDA if s.aligned and not s.pitch and s.result in ("16", "fp32", "fp32+")]
    return list(dict.fromkeys([*(Product(replace(s, control=False)) for s in suite), *MORE]))


def of_sizes(sizes: Iterable[str]) -> list[Product]:
    """The products with these sizes ("MxNxK"), in any layout and with any epilogue. ValueError for a size that no product has."""
    found = {size: [p for p in products() if f"{p.shape.m}x{p.shape.n}x{p.shape.k}" == size] for size in sizes}
    if missing := [size for size, some in found.items() if not some]:
        raise ValueError(f"--only has {', '.join(missing)}; accepted are the sizes that --list shows, as MxNxK")
    return [p for some in found.values() for p in some]


def line(product: Product) -> str:
    """The line of a product that `tiles.cpp` reads."""
    s = product.shape
    return f"{s.m} {s.n} {s.k} {s.layout} {s.result} {product.epilogue} {s.batch}"


def build(program: Path) -> None:
    """Compiles `tiles.cpp` with the kernel, for Hopper."""
    csrc = HERE.parent / "csrc"
    options = ["-std=c++20", "-O3", "--fmad=false", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a"]
    sources = [
        HERE / "tiles.cpp",
        *(csrc / "gemm" / "sm90").glob("gemm_bf16*.cu"),
        *(csrc / "gemm" / "sm90" / f"{kind}_bf16.cu" for kind in ("chained", "symmetric")),
    ]
    subprocess.run(["nvcc", *options, "-I", csrc, "-o", program, *sources], check=True)


def sweep(program: Path, timed: Iterable[Product], seconds: float, sample_ms: float) -> list[str]:
    """Rows of `gemm_tiles.csv`, as the program takes the times."""
    lines = "".join(line(product) + "\n" for product in timed)
    command = [program, str(seconds), str(sample_ms)]
    run = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, check=True)
    return run.stdout.splitlines()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tiles", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"where {FILE} goes")
    parser.add_argument("--seconds", type=float, default=300, help="of the GPU's time, at most")
    parser.add_argument("--sample-ms", type=float, default=6, help="of a sample")
    parser.add_argument("--list", action="store_true", help="print the products and end")
    parser.add_argument(
        "--only", nargs="+", metavar="MxNxK", help="print the times of these products, and write no file"
    )
    parser.add_argument("--program", type=Path, help="compiled before; nvcc is not needed then")
    options = parser.parse_args(argv)
    if options.list:
        print(*map(line, products()), sep="\n")
        return 0
    if (options.out is None) == (options.only is None):
        parser.error("one of --out, --only and --list is needed")
    try:
        timed = of_sizes(options.only) if options.only else products()
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        program = options.program or Path(folder) / "tiles"
        if options.program is None:
            build(program)
        rows = sweep(program, timed, options.seconds, options.sample_ms)
    if options.only:
        print(*rows, sep="\n")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    today = datetime.date.today().isoformat()
    count = write(options.out / FILE, rows, f"Every tile of gemm_sm90 that takes a product, {today}")
    print(f"{count} times in {options.out / FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
