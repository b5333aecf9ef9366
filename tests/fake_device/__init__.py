"""An accelerator for tests on a machine that has none: pegprof's own child processes find it as they would a real one.

    FakeDevice ──> environment ──> JAX's plug-in in every process ──> a ledger of who had the device

The plug-in is in ``plugin/``, which is no part of this package: only children that a test starts can import it.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Literal

PLUGIN = Path(__file__).parent / "plugin"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeDevice:
    """A device that one process can have at a time.

    Args:
      folder: where its ledger is.
      platform: by which JAX starts it.
      kind: what JAX calls it.
      memory_bytes: that it has.
      memory_stats: whether it keeps them, has none, or has no such function.
      others_bytes: what somebody else has taken of it, of which its statistics say nothing.
      deadly_bytes: a program that takes as many besides its arguments kills its process; None for none.
    """

    folder: Path
    platform: Literal["cuda", "tpu"] = "cuda"
    kind: str = "NVIDIA H100 80GB HBM3"
    memory_bytes: int = 2**30
    memory_stats: Literal["kept", "none", "raises"] = "kept"
    others_bytes: int = 0
    deadly_bytes: int | None = None

    def environment(self, python_path: str) -> dict[str, str]:
        """The variables by which a process has this device, besides those that it has."""
        fields = {**dataclasses.asdict(self), "folder": str(self.folder)}
        return {
            "FAKE_DEVICE": json.dumps(fields),
            "JAX_PLATFORMS": f"{self.platform},cpu",
            "PYTHONPATH": os.pathsep.join([str(PLUGIN), python_path]),
        }

    def events(self, name: str) -> list[dict]:
        """The lines of the ledger that tell of one kind of event."""
        lines = (self.folder / "ledger.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]
