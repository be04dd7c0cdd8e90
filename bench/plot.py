"""The harness's plot: each provider's share of the roofline, case by case."""

from pathlib import Path


def plot(path: Path, rows: list[dict], title: str) -> bool:
    """Writes the PNG `path` from timed rows. False if matplotlib is not installed or nothing was timed."""
    rows = [row for row in rows if "roofline_share" in row]
    try:
        import matplotlib
    except ImportError:
        return False
    if not rows:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cases = list(dict.fromkeys((row["op"], row["shape"], row["dtype"]) for row in rows))
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    height = 0.8 / len(providers)
    figure, axis = plt.subplots(figsize=(10, 1.5 + 0.16 * len(cases) * (1 + len(providers))))
    for i, provider in enumerate(providers):
        shares = {(r["op"], r["shape"], r["dtype"]): r["roofline_share"] for r in rows if r["provider"] == provider}
        places = [cases.index(case) + (i - (len(providers) - 1) / 2) * height for case in shares]
        axis.barh(places, [100 * share for share in shares.values()], height=height, label=provider)
    axis.set_yticks(range(len(cases)), ["  ".join(case) for case in cases], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("share of the roofline measured in the same run, % (above 100: from cache)")
    axis.axvline(100, color="black", linewidth=0.8)
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=8)
    axis.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True
