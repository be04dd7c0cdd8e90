"""The file that a sweep over gemm_sm90's tiles fills."""

from bench import tiles
from bench.prediction import measured, tile_times
from bench.prediction.tile_times import FILE, Choice


def test_the_list_has_what_was_timed(capsys):
    assert tiles.main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "8192 6144 4096 NT 16 none 1"
    assert set(measured.tiles()) <= set(tiles.products())


def test_the_least_time_of_a_choice_is_kept(tmp_path):
    rows = [f"64,64,64,NT,16,none,1,64x64 1x1,{splits},0,{us}" for splits, us in ((1, 3.5), (2, 4.0), (1, 3.25))]
    assert tile_times.write(tmp_path / FILE, rows, "A test") == 2
    (times,) = tile_times.read(tmp_path / FILE).values()
    assert times == {Choice("64x64 1x1", 1, False): 3.25, Choice("64x64 1x1", 2, False): 4.0}
