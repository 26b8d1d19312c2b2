"""What only a process of its own shows: signals, pipes, terminals, and what libraries print."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from invocation import Invoke, assert_done, assert_refused, names, run_process

# A build that stops behind the weights; a shell may have made SIGINT ignored.
SLOW_BUILD = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import trtspec.engine_build as engine_build
place_weights = engine_build.place_weights
def slow(*args):
    result = place_weights(*args)
    print("placed", flush=True)
    time.sleep(300)
    return result
engine_build.place_weights = slow
from trtspec.cli.main import main
main()
"""


def start_slow_build(target: Path, output: Path) -> subprocess.Popen[str]:
    """A build that has written its weights and goes no further."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILD, "build", str(target), "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "placed\n"
    return process


def test_killed_build(trtspec: Invoke, tiny_hf_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    process = start_slow_build(tiny_hf_dir, output)
    assert names(tmp_path) == [f".out.building-{process.pid}"]
    process.kill()
    process.communicate()
    assert not output.exists()
    assert names(tmp_path) == [f".out.building-{process.pid}"]
    assert_refused(trtspec("run", output, "--prompt", "Hi"), f"there is no engine directory {output}")
    leftover = tmp_path / f".out.building-{process.pid}"
    assert_refused(trtspec("run", leftover, "--prompt", "Hi"), "is no engine directory (it has no engine.json)")
    assert_done(trtspec("build", tiny_hf_dir, "--output", output))
    assert names(tmp_path) == ["out"]
    assert_done(trtspec("run", output, "--prompt", "Hi", "--max-new-tokens", 1))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_build(tiny_hf_dir: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = start_slow_build(tiny_hf_dir, tmp_path / "out")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, "", "error: interrupted")
    assert names(tmp_path) == []


def test_piped_output_holds_results_only(tiny_hf_dir: Path, tmp_path: Path) -> None:
    """No progress bar, no log line, no library's warning."""
    output, dataset, report = tmp_path / "out", tmp_path / "set.jsonl", tmp_path / "report.json"
    dataset.write_text('{"turns": ["one two one two one"]}\n')
    built = run_process("build", tiny_hf_dir, "--output", output)
    assert_done(built)
    assert built.out.startswith(f"{output}: tiny-llama, float32, onnxruntime")
    options = ("--compare", "hf", "--max-new-tokens", 8, "--json", report)
    benched = run_process("bench", output, "--dataset", dataset, *options)
    assert_done(benched)
    assert benched.out.startswith("method")
    assert json.loads(report.read_text())["lossless"]
    ran = run_process("-v", "run", output, "--prompt", "Hi", "--stats", "--json", "--max-new-tokens", 2)
    assert ran.code == 0
    assert [line["index"] for line in ran.lines] == [0]
    assert "acceptance_length" in ran.err


def test_progress_bar_on_a_terminal(tiny_hf_dir: Path, tmp_path: Path) -> None:
    terminal, stderr = pty.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "trtspec", "build", str(tiny_hf_dir), "--output", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr) as process:
        os.close(stderr)
        shown = b""
        while chunk := read_terminal(terminal):
            shown += chunk
        assert process.stdout
        assert b"%" not in process.stdout.read()
    os.close(terminal)
    assert process.returncode == 0
    assert b"weights" in shown
    assert b"%|" in shown


def read_terminal(terminal: int) -> bytes:
    """The next bytes; none where the other side was closed."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


def test_reader_that_goes_away(tiny_dir: Path) -> None:
    command = [sys.executable, "-m", "trtspec", "run", str(tiny_dir), "--prompt", "Hi", "--max-new-tokens", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.close()
        assert process.stderr
        error = process.stderr.read()
    assert process.returncode == 1
    assert error == b""


def test_refusals_print_one_line(tiny_dir: Path, tiny_hf_dir: Path, tmp_path: Path) -> None:
    """Where a library might print something of its own."""
    assert_refused(run_process("run", tiny_dir, stdin=b"word " * 9000), "holds 512 per sequence")
    without = tmp_path / "without"
    without.mkdir()
    for name in ("config.json", "model.safetensors"):
        (without / name).symlink_to(tiny_hf_dir / name)
    assert_refused(run_process("build", without, "--output", tmp_path / "out"), "without has no tokenizer")
    assert names(tmp_path) == ["without"]


def test_stdin_that_is_not_utf8(tiny_dir: Path) -> None:
    """In this locale Python reads such bytes as surrogates."""
    assert_refused(run_process("run", tiny_dir, stdin=b"na\xefve"), "give UTF-8")
