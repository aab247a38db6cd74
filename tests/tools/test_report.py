"""tools/report.py, and its pages in a real browser."""

import re
import shutil
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rl_metrics import METRICS, CompletionPair, MetricsWriter, write_completions
from rl_metrics.panels import PANELS

ROOT = Path(__file__).resolve().parents[2]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "</td><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"

in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome in PATH")


def write_run(folder: Path, *, learning_rate: float, best: float) -> Path:
    """A run folder with every metric, and hostile text wherever a run can put text."""
    folder.mkdir()
    with MetricsWriter.create(folder / "metrics.jsonl") as writer:
        for step in range(1, 9):
            values = dict.fromkeys(METRICS, best * step / 8)
            writer.write(step, values)
    config = f"[optim]\nlearning_rate = {learning_rate}\n[task]\nname = {HOSTILE!r}\n"
    (folder / "effective_config.toml").write_text(config.replace("'", '"').replace('"owned"', "1"))
    (folder / "environments.json").write_text('{"sampler": {"OMP_NUM_THREADS": "2"}}')
    pair = CompletionPair(
        prompt="2 + 2?",
        ground_truth="4",
        before=HOSTILE,
        after=f"{HOSTILE} \x1b[31m 4",
        reward_before=0.0,
        reward_after=1.0,
    )
    write_completions([pair], folder / "completions.json")
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs that differ in one setting."""
    return (
        write_run(tmp_path / "run-a", learning_rate=1e-6, best=0.5),
        write_run(tmp_path / "run-b", learning_rate=2e-6, best=0.75),
    )


def report(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "report.py", *arguments],
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
    )


class Page(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}


def assert_self_contained(html: str) -> None:
    """No script, no handler, nothing from elsewhere, and a policy that forbids both."""
    page = Page(html)
    assert not {"script", "link", "iframe", "img", "object", "embed", "base"} & set(page.tags)
    assert not {"src", "href", "srcset", "action"} & page.attributes
    assert not any(name.startswith("on") for name in page.attributes)
    assert not re.search(r"https?:|@import|url\(", html)
    assert "default-src 'none'" in html


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_a_run_becomes_a_page_and_a_picture(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Both lie in the run folder; every panel, the configuration and the environment are there."""
    done = report(runs[0], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page, picture = map(Path, done.stdout.split())
    assert (page, picture) == (runs[0] / "report.html", runs[0] / "plot.png")
    html = page.read_text(encoding="utf-8")
    assert_self_contained(html)
    assert all(f"<h3>{panel.title}</h3>" in html for panel in PANELS)
    assert "learning_rate = 1e-06" in html
    assert "OMP_NUM_THREADS" in html
    assert html.count("&lt;script&gt;") == 3  # two answers and the configuration
    assert "\u241b[31m" in html
    assert png_size(picture)[0] > 1000


def test_two_runs_become_one_page(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """What differs stands first, once; both files lie where asked for."""
    done = report(*runs, "--output", "pages", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "pages" / "comparison.html").read_text(encoding="utf-8")
    assert_self_contained(html)
    differences = html[html.index("Set differently") : html.index("In short")]
    assert re.findall(r"<code>(.*?)</code>", differences) == ["optim.learning_rate"]
    assert re.findall(r'class="text">(.*?)<', differences) == ["1e-06", "2e-06"]
    assert png_size(tmp_path / "pages" / "comparison.png")[0] > 1000


def test_runs_of_one_name_are_told_apart(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """By the folders above; one folder twice is refused."""
    for parent, run in zip(("x", "y"), runs, strict=True):
        shutil.copytree(run, tmp_path / parent / "run")
    done = report("x/run", "y/run", "--no-plot", cwd=tmp_path)
    assert done.stdout == "comparison.html\n"
    assert "<title>x/run and y/run</title>" in (tmp_path / "comparison.html").read_text()
    done = report("x/run", "x/run", cwd=tmp_path)
    assert done.returncode == 2
    assert "report: expected two run folders, got " in done.stderr


def test_what_is_no_run_folder_is_said(tmp_path: Path) -> None:
    """One line, no traceback, no file."""
    done = report(tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        f"report: {tmp_path} is no run folder: expected a file metrics.jsonl in it\n"
    )
    assert not list(tmp_path.iterdir())


def browse(page: Path, tmp_path: Path, *arguments: str) -> str:
    """What chromium prints about a page."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}"),
            *(*arguments, page.as_uri()),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout


@in_a_browser
def test_a_browser_shows_the_page_and_runs_nothing_of_it(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    """The title is the runs', so no script has run; the page is light or dark as asked for."""
    assert report(*runs, "--output", tmp_path / "pages", "--no-plot", cwd=tmp_path).returncode == 0
    page = tmp_path / "pages" / "comparison.html"
    dom = browse(page, tmp_path, "--dump-dom")
    assert "<title>run-a and run-b</title>" in dom
    assert "<title>owned" not in dom
    assert "<script" not in dom
    assert dom.count("<figure") > len(PANELS)

    assert report(runs[0], "--no-plot", cwd=tmp_path).returncode == 0
    for name, width, scheme in (("light", 1200, 1), ("dark", 1200, 0), ("narrow", 400, 1)):
        picture = tmp_path / f"{name}.png"
        browse(
            runs[0] / "report.html",
            tmp_path,
            f"--screenshot={picture}",
            f"--window-size={width},900",
            f"--blink-settings=preferredColorScheme={scheme}",
        )
    sizes = {name: png_size(tmp_path / f"{name}.png") for name in ("light", "dark", "narrow")}
    assert sizes["light"] == sizes["dark"] == (1200, 900)
    assert brightness(tmp_path / "light.png") > 0.85
    assert brightness(tmp_path / "dark.png") < 0.2


def brightness(path: Path) -> float:
    """Mean of a picture, from 0 (black) to 1 (white)."""
    from matplotlib.image import imread  # noqa: PLC0415

    return float(imread(path)[:, :, :3].mean())
