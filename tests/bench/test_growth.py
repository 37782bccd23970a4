"""`python -m bench --growth`: medians, slopes, tables, and the command at tiny sizes."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest

from bench import __main__ as command
from bench.growth.growth import PARTS, Growth
from bench.growth.loads import Client, get, probing
from bench.growth.readings import Reading, Slope, summarise
from bench.growth.report import tables
from bench.servers import BenchFailed, Server
from bench.tables import Spread, cell, number, replace_part
from tests.bench.test_load import answering, ok

SLOPE = Slope("ms", "us per extra", 1000.0)


def readings(*rounds: tuple[float, ...], sizes: tuple[int, ...] = (1, 2, 4)) -> list[Reading]:
    return [
        Reading("c = 1", size, {"ms": figure}, i)
        for i, figures in enumerate(rounds)
        for size, figure in zip(sizes, figures, strict=True)
    ]


def test_a_slope_is_the_median_of_the_rounds_and_grows_where_the_cost_is_not_linear() -> None:
    one, two, four, together = summarise(readings((1.0, 2.0, 6.0), (11.0, 12.0, 18.0), (1.0, 4.0, 8.0)), [SLOPE])
    assert (one.size, two.size, four.size, together.size) == (1, 2, 4, None)
    assert one.figures == {"ms": Spread(1.0, 1.0, 11.0)}
    assert one.slopes == {}
    assert two.slopes == {"us per extra": Spread(1000.0, 1000.0, 3000.0)}
    assert four.slopes == {"us per extra": Spread(2000.0, 2000.0, 3000.0)}
    # A line is unchanged by what all sizes of a round have in common.
    (*_, line) = summarise(readings((3.0, 5.0, 9.0), (103.0, 105.0, 109.0)), [SLOPE])
    assert line.slopes["us per extra"].low == pytest.approx(2000.0)
    assert line.slopes["us per extra"].high == pytest.approx(2000.0)


def test_a_single_size_has_no_slope() -> None:
    assert [line.size for line in summarise(readings((1.0,), sizes=(7,)), [SLOPE])] == [7]


def test_the_table_has_a_row_for_each_figure_and_a_column_for_each_size() -> None:
    lines = summarise([*readings((1.0, 2.0, 6.0)), Reading("c = 32", 4, {"ms": 1234.5})], [SLOPE])
    assert tables([Growth(PARTS["steps"], tuple(lines))]).splitlines() == [
        "### Steps of a graph",
        "",
        "| load | steps | 1 | 2 | 4 | all sizes |",
        "| --- | --- | --- | --- | --- | --- |",
        "| c = 1 | ms | 1.00 | 2.00 | 6.00 |  |",
        "| c = 1 | us per extra |  | 1,000 | 2,000 | 1,714 |",
        "| c = 32 | ms |  |  | 1,234 |  |",
    ]


def test_a_cell_has_the_spread_unless_there_is_none() -> None:
    assert cell(Spread(0.5, 0.25, 12.25)) == "0.50 (0.25 to 12.2)"
    assert cell(Spread(2.0, 2.0, 2.0)) == "2.00"
    assert cell(None) == ""
    assert [number(value) for value in (-0.001, 99.96, 123456.7)] == ["0", "100.0", "123,457"]


def test_the_tables_replace_those_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- growth: begin -->\nold\n<!-- growth: end -->\nafter\n")
    replace_part(page, "growth", "new")
    replace_part(page, "growth", "newer")
    assert page.read_text() == "before\n<!-- growth: begin -->\n\nnewer\n\n<!-- growth: end -->\nafter\n"
    with pytest.raises(BenchFailed, match="latency: begin"):
        replace_part(page, "latency", "new")


def test_a_failed_response_ends_the_measurement_and_is_shown() -> None:
    with answering(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy") as port:
        server = Server("flowserve", 0, port, Path())
        with pytest.raises(BenchFailed, match=r"GET /x HTTP/1\.1 with 503: busy"), closing(Client(server)) as client:
            client.ask(get("/x"))
        with pytest.raises(BenchFailed, match="/v2/health/live"), probing(server):
            pass


def test_the_probe_keeps_the_longest_response() -> None:
    with answering(ok(b"live")) as port, probing(Server("flowserve", 0, port, Path())) as probe:
        while not probe.longest_s:
            pass
    assert 0 < probe.longest_s < 5


@pytest.mark.parametrize("given", ["step", "steps=", "steps=0", "steps=1,x", "deployments=100001"])
def test_an_unknown_part_or_size_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--growth", given])
    assert "--growth" in capsys.readouterr().err


@pytest.mark.server
def test_every_part_is_measured_with_checked_responses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- growth: begin --><!-- growth: end -->")
    sizes = ["steps=1,2", "deployments=1,2", "connections=3,4", "sequences=1,32"]
    shortly = ["--rounds", "1", "--seconds", "0.2", "--client", "own", "--results", str(tmp_path)]
    command.main(["--growth", *sizes, *shortly, "--page", str(page)])

    text = (tmp_path / "growth.md").read_text()
    assert text in capsys.readouterr().out
    assert text.strip() in page.read_text()
    assert "requests/s" in (tmp_path / "growth.svg").read_text()
    assert "](growth.svg)" in page.read_text()
    found = {
        (title, load, figure): cells
        for title, table in re.findall(r"### (.+)\n\n((?:\|.*\n)+)", text)
        for load, figure, *cells in ([part.strip() for part in row.split("|")[1:-1]] for row in table.splitlines()[2:])
    }
    for title, loads, headings in (
        (
            "Steps of a graph",
            ("inline, c = 1", "inline, c = 32", "process, c = 1", "process, c = 32"),
            ("requests/s", "CPU us/request", "p99 ms", "us per extra step"),
        ),
        (
            "Deployments of a server",
            ("c = 8",),
            ("start s", "memory MiB", "/metrics ms", "longest live during /metrics ms", "load one ms", "unload one ms"),
        ),
        ("Connections of a server", ("all active",), ("requests/s", "p99 ms")),
        ("Connections of a server", ("idle, beside 32 active",), ("requests/s", "p99 ms", "memory KiB per connection")),
        ("Live sequences of a model", ("c = 1",), ("requests/s", "CPU us/request", "memory KiB per sequence")),
    ):
        for load in loads:
            for heading in headings:
                smaller, larger, together = found[title, load, heading]
                assert re.fullmatch(r"-?[\d,.]+", larger), (load, heading)
                assert bool(smaller) != bool(together)  # figures have no line over all sizes, slopes no smallest size
    # One sequence cannot have 32 requests in flight.
    assert found["Live sequences of a model", "c = 32", "requests/s"][0] == ""
