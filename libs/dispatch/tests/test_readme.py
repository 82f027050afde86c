import re
from pathlib import Path


def test_readme_code_runs():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 2
    names = {}
    for block in blocks:
        exec(block, names)  # noqa: S102  # the blocks of our own README
    assert names["metrics"].meters["s1"].programs == 1


def test_readme_names_every_module_of_the_core():
    root = Path(__file__).parents[1]
    table = (root / "README.md").read_text()
    for path in (root / "src/wooly_dispatch").glob("*.py"):
        assert path.stem in ("__init__", "errors") or f"`{path.stem}`" in table, path.stem
