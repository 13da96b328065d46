"""README and docs: links lead somewhere, and the commands in them are commands."""

import re
import shlex
from pathlib import Path

import pytest

from realm import cli, hub

ROOT = Path(__file__).parent.parent
PAGES = {
    str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("realm/**/*.md"))
}


def anchors(text: str) -> set[str]:
    """The names by which GitHub links to the headings of a page."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page: str) -> None:
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (folder / path).resolve() if path else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target


def test_the_site_has_every_page_of_docs() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"^ *- (?:.*: )?(\S+\.md)$", nav, re.MULTILINE)
    assert sorted(f"docs/{page}" for page in listed) == sorted(
        page for page in PAGES if page.startswith("docs/")
    )


@pytest.mark.parametrize("page", PAGES)
def test_files_that_pages_name_are_there(page: str) -> None:
    if "experiments" not in page:  # whose files were renamed since
        for path in re.findall(
            r"\b(?:realm|tests|benchmarks|recipes|examples|configs)/[\w/.-]+\.(?:py|toml)", PAGES[page]
        ):
            assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_accepted_by_the_parser(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("kb", "model"):  # the parser looks a workspace up
        (tmp_path / "manual" / part).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "workspace_folder", lambda name: Path(name.removeprefix("hf:me/")))
    for block in re.findall(r"^```sh\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            # also after torchrun
            if command := re.search(r"(?:^|-m )realm (.*?)&?$", line):
                cli._parser().parse_args(shlex.split(command[1], comments=True))
