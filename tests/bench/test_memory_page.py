"""The pages on the memory of optimizers show what their buffers take, and what fits with them."""

from bench import memory_page


def test_the_pages_and_the_picture_are_those_of_now():
    again = "python -m bench.memory_page writes them anew"
    for path, table in memory_page.TABLES.items():
        assert memory_page.page(path.read_text(), table()) == path.read_text(), again
    assert memory_page.picture() == memory_page.PICTURE.read_text(), again


def test_bytes_are_those_of_the_formats():
    totals = [sum(memory_page.held(*layout).values()) for layout in memory_page.LAYOUTS]
    assert totals == [12, 14, 6.0625, 14, 12, 8, 6.0625, 5.0625, 4.0625, 4.03125]
