"""Do the tests notice when the source is wrong? Each mutant is one wrong line.

    python -m tests.mutants [file …]

A mutant is caught if a test of its room fails. Works on a copy; prints a line for each mutant.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 300
APART = shutil.ignore_patterns(".*", "__pycache__")

# (file, tests, right line, wrong line)
MUTANTS = (
    ("batching.py", "batching", "len(batch) < self.limit.size:", "len(batch) <= self.limit.size:"),
    ("batching.py", "batching", "expected_by = batch[0].enqueued_at", "expected_by = now()"),
    ("batching.py", "batching", "if self._last.clients != 1 and", "if"),
    ("batching.py", "batching", "Batch(len(batch) + self._queue.depth", "Batch(len(batch)"),
    ("batching.py", "batching", "if entry.is_wanted(now)]", "]"),
    ("batching.py", "batching", "live[:middle], live[middle:]", "live[:middle], live[:middle]"),
    ("batching.py", "batching", "failed // 2))", "failed))"),
    ("batching.py", "batching", "self.size = min(self._largest, self.size * 2)", "self.size *= 2"),
    ("batching.py", "reloading", "return batch, entry", "return [], entry"),
    ("batching.py", "batching", "record_drain(len(batch)", "record_drain(1"),
    ("entries.py", "batching", "and now < self.request.deadline", ""),
    ("entries.py", "batching", "error = copy(error)", "pass"),
    ("entries.py", "generating", "if self.request.streams:", "if True:"),
    ("queueing.py", "batching", "self.depth + inputs <= ", "self.depth + inputs < "),
    ("queueing.py", "batching", "self.depth -= len(request.waiting)", "pass"),
    ("queueing.py", "generating", "sorted(responses, key=lambda", "list(responses) or (lambda"),
    ("queueing.py", "batching", "(request.waiting) < len(", "(request.waiting) <= len("),
    ("queueing.py", "batching", "RETRY_AFTER_MAX_S = 30", "RETRY_AFTER_MAX_S = 31"),
    ("queueing.py", "batching", "and entry.request.closed:", "and False:"),
    ("queueing.py", "generating", "in tuple(request.running.values())", "in ()"),
    ("queueing.py", "batching", "if self.state in (State.LOADING, State.RECOVERING):", "if True:"),
    ("stages.py", "batching", "if len(results) != len(values):", "if False:"),
    ("stages.py", "batching", "except BaseException as error:", "except Exception as error:"),
    ("stages.py", "stages", "longest * (len(chunk) + 1) if pads else total", "total"),
    ("worker.py", "batching", "self._queue.close()", "pass"),
    ("reloading.py", "reloading", "if self.busy:\n            what", "if False:\n            what"),
    ("reloading.py", "reloading", "await switch.done.wait()", "pass"),
    ("generating.py", "generating", "await self._places.acquire()", "pass"),
    ("config.py", "config", ", env_settings, files", ", files, env_settings"),
    ("config.py", "config", '"***" if "key" in name.lower() else ', ""),
    ("config.py", "config", 'extra="forbid"', 'extra="ignore"'),
    ("cpus.py", "config", "round(_cgroup_quota() or allowed)", "allowed"),
    ("api/http.py", "server", "if len(body) > max_bytes:", "if False:"),
    ("api/http.py", "server", "return min(seconds, settings.request_timeout_s)", "return seconds"),
    ("api/http.py", "server", "or not any(known):", "or not known:"),
    ("api/http.py", "process", "pending.hang_up()", "pass"),
    ("server.py", "server", "errors.ModelFailed: 424", "errors.ModelFailed: 500"),
    ("protocol.py", "connections", "if self._bytes > HEAD_BYTES:", "if False:"),
    ("lifecycle.py", "process", "self.exit_code or int(unanswered > 0)", "self.exit_code"),
    ("inference/plans.py", "plans", "if length <= space:", "if length <= space + 1:"),
    ("inference/blocks.py", "ladder", "None] == members[", "None] >= 0 * members["),
    ("inference/blocks.py", "ladder", "places + self._position_offset", "places"),
    ("inference/linear.py", "linear", "rows.abs().amax(1, keepdim=True)", "rows.abs().amax()"),
    ("inference/pipeline.py", "pipeline", "isinstance(output, ModelFailed) else", "False else"),
    ("media.py", "media", "if width * height > MAX_PIXELS:", "if False:"),
    ("batching.py", "batching", "and self._too_large == too_large:", "and True:"),
    ("generating.py", "generating", "self._queue.start_admitting()  # the", "pass  # the"),
    ("generating.py", "generating", "                    raise\n", "                    pass\n"),
    ("reloading.py", "reloading", "if model_id or revision:", "if model_id:"),
    ("telemetry.py", "telemetry", "suppress(OSError, ValueError)", "suppress(ValueError)"),
    ("telemetry.py", "server", 'path.startswith(f"{root}/") else', "False else"),
    ("protocol.py", "connections", "and not self.cycle.response_complete:", "and False:"),
    ("api/formats.py", "huggingface", "len(each) > WORD for each in", "False for each in"),
    ("api/events.py", "events", 'if "error" in state:', "if False:"),
    ("inference/reading.py", "whole", "if read > PIECES", "if False and read > PIECES"),
)  # fmt: skip


def survivors(names: list[str]) -> Iterator[str]:
    """Yield the mutants of the files `names`, or of all, that no test has noticed."""
    for file, tests, right, wrong in MUTANTS:
        if names and file not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            shutil.copytree(ROOT, copy, ignore=APART)
            text = (copy / file).read_text()
            assert text.count(right) == 1, (file, right)
            (copy / file).write_text(text.replace(right, wrong))
            command = [sys.executable, "-m", "pytest", "-xq", f"tests/test_{tests}.py"]
            try:
                ran = subprocess.run(
                    command, cwd=copy, check=False, timeout=LIMIT_S, stdout=subprocess.PIPE
                )
                caught = ran.returncode == 1
            except subprocess.TimeoutExpired:
                caught = True
        mutant = f"{file}: {wrong!r} for {right!r}"
        sys.stdout.write(f"{'caught' if caught else 'SURVIVES'}  {mutant}\n")
        sys.stdout.flush()
        if not caught:
            yield mutant


if __name__ == "__main__":
    alive = list(survivors(sys.argv[1:]))
    sys.exit(1 if alive else 0)
