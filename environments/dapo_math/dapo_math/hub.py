"""Reads the sets that are published on the Hugging Face hub, each at a fixed revision where one is known."""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)
_BATCH = 4096


@dataclass(frozen=True)
class HubSet:
    """Args:
    id: on the hub.
    split: which one is read.
    rows: how many rows it has, by configuration.
    revision: the commit that is read; None reads the newest.
    by_language: the configuration is the chosen language; otherwise `rows` names the only one, None being the default.
    """

    id: str
    split: str
    rows: Mapping[str | None, int]
    revision: str | None = None
    by_language: bool = False


_GSM8K = ("openai/gsm8k", "740312add88f781978c0658806c59bc2815b9866")

HUB: dict[str, HubSet] = {
    "dapo-17k": HubSet(
        "BytedTsinghua-SIA/DAPO-Math-17k", "train", {None: 1_791_700}, "65877096c24ffa7abc4e4fa5edb95cf3413a5674"
    ),
    "dapo-17k-processed": HubSet(
        "open-r1/DAPO-Math-17k-Processed",
        "train",
        {"all": 17_398, "en": 14_116, "cn": 3_282},
        "31dd309567e3da778038cc87d868b6097a3ccf68",
        by_language=True,
    ),
    "dapo-17k-filtered": HubSet("hamishivi/DAPO-Math-17k-Processed_filtered", "train", {None: 12_643}),
    "gsm8k-train": HubSet(_GSM8K[0], "train", {"main": 7_473}, _GSM8K[1]),
    "gsm8k-test": HubSet(_GSM8K[0], "test", {"main": 1_319}, _GSM8K[1]),
    "math500-levels": HubSet("HuggingFaceH4/MATH-500", "test", {None: 500}, "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"),
}
"""Revisions and row counts as public experiment records pin them."""


def hub_rows(name: str, language: str, revision: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a hub set with their numbers, from 1.

    Args:
        name: key of `HUB`.
        language: configuration of a set that has one a language.
        revision: commit, branch or tag to read instead; its number of rows is then not checked.

    Raises:
        ValueError: `datasets` is missing, the set cannot be loaded, or it has another number of rows than is known.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"dataset {name!r} comes from the hub: pip install 'dapo-math[hub]'") from error
    hub_set = HUB[name]
    configuration = language if hub_set.by_language else next(iter(hub_set.rows))
    wanted = revision or hub_set.revision
    try:
        loaded = datasets.load_dataset(hub_set.id, configuration, split=hub_set.split, revision=wanted)
        table: Any = loaded.with_format("arrow")
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"dataset {name!r} ({hub_set.id}) cannot be loaded from the hub: {error}") from error
    if wanted is None:
        found = _resolved(loaded)
        advice = f"; set revision = {found!r} to keep it" if found else ""
        _log.warning("dataset %r is read at its newest revision%s", name, advice)
    number = 0
    # Batches come from the memory-mapped file, so that repeated rows never pile up.
    for batch in table.iter(batch_size=_BATCH):
        for row in batch.to_pylist():
            number += 1
            yield number, row
    if revision is None and number != (known := hub_set.rows[configuration]):
        raise ValueError(
            f"dataset {name!r} ({hub_set.id}, revision {wanted or 'newest'}) has {number} rows, known are {known}; if "
            "this is on purpose, name the revision to read with the setting revision"
        )


def _resolved(loaded: Any) -> str | None:
    """The commit that was downloaded, which `datasets` keeps in the addresses of the files alone."""
    for address in loaded.info.download_checksums or {}:
        if match := re.search(r"@([0-9a-f]{40})/", address):
            return match.group(1)
    return None
