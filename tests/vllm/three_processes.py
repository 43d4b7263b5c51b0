"""What test_v1_engine.py runs in a process of its own: an engine whose core and worker are two more."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import tiny_engine


def main(folder: Path, drafts: str, report: Path) -> None:
    from vllm import SamplingParams

    with tiny_engine.engine(folder, None, drafts, distributed_executor_backend="mp") as llm:
        found = {}
        for name, extra_args in (("default", None), ("lossless", {"cactus_delta": 0})):
            options = {"temperature": 0.8, "max_tokens": 3, "ignore_eos": True, "detokenize": False}
            found[name] = tiny_engine.texts(llm, SamplingParams(**options, extra_args=extra_args), 2000)
        statistics = llm.collective_rpc("cactus_statistics")[0]
        core = llm.llm_engine.engine_core.resources.engine_manager.processes[0].pid
        children = Path(f"/proc/{core}/task/{core}/children").read_text().split()
    processes = [os.getpid(), core, *map(int, children)]
    report.write_text(json.dumps({"texts": found, "statistics": statistics, "processes": processes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
