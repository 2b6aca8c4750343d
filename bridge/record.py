"""What an engine says of one call to the bridge, and how it travels: inside the answer, before its last part.

The record is JSON between two ASCII record separators. Neither JSON nor server-sent events ever hold that byte, so
the bridge takes the record out and passes every other byte on as it came.
"""

import msgspec

CALL_HEADER = "X-Bridge-Call"
TOKEN_HEADER = "X-Bridge-Token"
SEPARATOR = b"\x1e"


class Choice(msgspec.Struct):
    """One choice: sampled ids, their logprobs under the sampling distribution, `[version, start, end]` spans."""

    index: int
    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[tuple[int, int, int]]


class Generation(msgspec.Struct):
    """One prompt that the engine worked on; a request with several prompts, or with tool rounds, makes several.

    Args:
        sampling: the parameters the engine sampled with, defaults filled in.
        first_token: seconds since the epoch when the first token was there.
    """

    prompt_ids: list[int]
    sampling: dict[str, float | int | str | None]
    first_token: float
    choices: list[Choice]


Record = list[Generation]

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Record).decode


class RecordReader:
    """Splits an answer's bytes, as they come, into what the client gets and the records."""

    def __init__(self) -> None:
        self._record: bytearray | None = None

    def feed(self, data: bytes) -> tuple[bytes, list[Record]]:
        """The client's part of `data`, and the records that end in it.

        Raises:
            msgspec.DecodeError, msgspec.ValidationError: a record is damaged.
        """
        if self._record is None and SEPARATOR not in data:
            return data, []
        clean, records = bytearray(), []
        for number, piece in enumerate(data.split(SEPARATOR)):
            if number:
                if self._record is None:
                    self._record = bytearray()
                else:
                    records.append(decode(bytes(self._record)))
                    self._record = None
            if self._record is None:
                clean += piece
            else:
                self._record += piece
        return bytes(clean), records

    @property
    def inside(self) -> bool:
        """Whether the bytes so far end within a record."""
        return self._record is not None
