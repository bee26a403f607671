"""What the simulator may import: the core, and no library that a worker needs."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAY_IMPORT = (
    "laminar.commandline",
    "laminar.core",
    "laminar.sim",
    "laminar.configrules",
    "laminar.ids",
    "laminar.errors",
    "laminar.plugins",
    "laminar.roofline",
    "laminar.samplers",
)


def test_the_simulator_imports_only_the_core_of_laminar():
    for path in sorted((ROOT / "laminar" / "sim").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("laminar"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                assert all(name.startswith(MAY_IMPORT) for name in names), f"{path.name} imports {names}"


def test_a_run_without_figures_loads_neither_matplotlib_nor_torch():
    code = "import sys, laminar.sim.__main__\n"
    code += "print([name for name in ('matplotlib', 'numpy', 'torch', 'asyncio') if name in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr
