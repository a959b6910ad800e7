"""Completion in the shells themselves, and that it costs little and runs nothing of a store."""

from __future__ import annotations

import json
import os
import pty
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import ckpipe
from tests.support.command_line import forked, save_steps

PROGRAM = """#!{python}
import atexit, sys
atexit.register(lambda: open({log!r}, "a").write(f"{{'torch' in sys.modules}}\\n"))
from ckpipe.cli import main
main()
"""


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell that has the program, which logs whether it has imported torch."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "ckpipe"
    program.write_text(PROGRAM.format(python=sys.executable, log=str(tmp_path / "log")))
    program.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "HOME": str(tmp_path), "TERM": "dumb", "COLUMNS": "100"}


def needs(name: str) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed: its completion is not tested")


OFFERED = """
import contextlib, io, json, os, sys
from ckpipe.cli.app import run

os.environ["_CKPIPE_COMPLETE"] = "complete_bash"
for words in json.loads(sys.argv[1]):
    os.environ |= {"COMP_WORDS": "\\n".join(["ckpipe", *words]), "COMP_CWORD": str(len(words))}
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        run([])
    print(json.dumps(out.getvalue().split()))
"""


def test_commands_options_choices_steps_and_ids_are_completed(
    tmp_path: Path,
) -> None:
    one, two, root = tmp_path / "one", tmp_path / "two", "$HOME/one"
    old, new = save_steps(one, 100, 200)
    save_steps(two, 7)
    (tmp_path / "one" / "noise").mkdir()
    cases: list[tuple[list[object], list[str]]] = [
        (["un"], ["unpin"]),
        (["export", one, "--fo"], ["--form"]),
        (["export", one, "--form", ""], ["torch", "hf", "dcp"]),
        (["export", "--dtype", "b"], ["bf16", "bfloat16"]),
        (["info", one, ""], ["200", "100"]),
        (["info", one, "s"], [new, old]),
        (["rm", root, "1"], ["100"]),
        (["pin", "~/one", "2"], ["200"]),
        (["--json", "verify", f"file://{one}", "1"], ["100"]),
        (["cp", one, two, ""], ["200", "100"]),
        (["import", one, two, ""], ["200", "100"]),
        (["export", one, "x.pt", ""], ["200", "100"]),
        (["timeline", one, ""], ["200", "100"]),
        (["diff", one, ""], ["200", "100"]),
        (["diff", one, "100", "--in", two, ""], ["7"]),
        (["ls", ""], []),  # the shell completes paths
        (["info", tmp_path / "nothing", ""], []),
        (["info", "s3://bucket/run", ""], []),
        (["info", "s3:/bucket/run", ""], []),
    ]
    asked = json.dumps([[str(word) for word in words] for words, _ in cases])
    done = forked(OFFERED, asked, env=os.environ | {"HOME": str(tmp_path)})
    assert (done.code, done.err) == (0, "")
    for line, (words, expected) in zip(done.out.splitlines(), cases, strict=True):
        assert json.loads(line) == expected, words


def test_bash_completes_without_torch(shell: dict[str, str], tmp_path: Path) -> None:
    needs("bash")
    save_steps(tmp_path / "run", 100, 250)
    code = f"""
eval "$(_CKPIPE_COMPLETE=source_bash ckpipe)"
COMP_WORDS=(ckpipe diff {tmp_path}/run 100 2); COMP_CWORD=4
$(complete -p ckpipe | grep -o '_ckpipe[a-z_]*') ckpipe
echo "${{COMPREPLY[@]}}"
"""
    command = ["bash", "--norc", "-c", code]
    done = subprocess.run(command, env=shell, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("250\n", "")
    assert (tmp_path / "log").read_text().split() == ["False"] * 2


def test_fish_completes_and_shows_time_and_metrics(shell: dict[str, str], tmp_path: Path) -> None:
    needs("fish")
    save_steps(tmp_path / "run", 100, 250)
    code = f"""
env _CKPIPE_COMPLETE=source_fish ckpipe | source
complete -C "ckpipe diff {tmp_path}/run 100 2"
complete -C "ckpipe cp {tmp_path}/run {tmp_path}/bi"
"""
    command = ["fish", "--no-config", "-c", code]
    done = subprocess.run(command, env=shell, capture_output=True, text=True, check=True)
    (step, folder) = (line for line in done.stdout.splitlines() if line)
    name, about = step.split("\t")
    assert name == "250"
    assert about.startswith("20")
    assert about.endswith("loss=0.004")
    assert folder == f"{tmp_path}/bin/"


def in_zsh(environment: dict[str, str], steps: Sequence[tuple[str, str]]) -> None:
    """Type texts, and wait after each until zsh has shown another."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("zsh", ["zsh", "-f", "-i"], environment | {"PS1": "> "})
    try:
        for typed, expected in steps:
            shown = b""
            os.write(terminal, typed.encode())
            while expected.encode() not in shown:
                shown += os.read(terminal, 1 << 12)
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


@pytest.mark.timeout(300)
def test_zsh_completes_and_runs_nothing_of_a_hostile_store(
    shell: dict[str, str], tmp_path: Path
) -> None:
    needs("zsh")
    before = ("", "\\", "\\\\", "'", '"', '\\"', "`", "\\`touch pwned", "\n")
    with ckpipe.SyncPipeline(tmp_path / "run") as pipeline:
        for step, name in enumerate(before, 1):
            pipeline.save({"a": torch.ones(1)}, 11 * step, metrics={f"{name}$(touch pwned)": 1.0})
    load = 'autoload -Uz compinit; compinit -u -D; eval "$(_CKPIPE_COMPLETE=source_zsh ckpipe)"'
    run_ = shlex.quote(str(tmp_path / "run"))
    in_zsh(
        shell,
        [
            (f"cd {shlex.quote(str(tmp_path))}; {load}; echo LOA''DED\n", "LOADED"),
            (f"ckpipe info {run_} \t", " -- 20"),
            ("\x15ckpipe exp\t", "export "),
            ("\x15echo EN''D\n", "END"),
        ],
    )
    assert not (tmp_path / "pwned").exists()
