"""The durable log of conversations: tokens and texts of every finished turn, in one SQLite file.

Key/value state is never stored: after a restart it is computed again from the tokens, so a log stays valid
when the model's weights change. A turn is one transaction. The write-ahead log is synchronised at every
commit, so a turn that `append_turn` has returned for survives a killed process and a power failure; that
costs one synchronisation of the disk per turn, little against the seconds that a turn takes.
"""

import json
import logging
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from pensieve_jax.core.errors import InvalidArgumentError, LogError, UnknownConversationError
from pensieve_jax.core.messages import Message
from pensieve_jax.core.types import FinishReason

SCHEMA_VERSION = 2

_UPGRADES = {"1": "ALTER TABLE conversations ADD COLUMN tenant TEXT NOT NULL DEFAULT ''"}
"""Older versions that can be read -> the change that makes one the present version."""

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE conversations (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    created_s REAL NOT NULL,
    parent_id TEXT,
    parent_turns INTEGER,
    tenant TEXT NOT NULL DEFAULT ''
);
CREATE TABLE turns (
    conversation INTEGER NOT NULL REFERENCES conversations (number) ON DELETE CASCADE,
    turn INTEGER NOT NULL,
    input_ids BLOB NOT NULL,
    input_length INTEGER NOT NULL,
    input_crc32 INTEGER NOT NULL,
    output_ids BLOB NOT NULL,
    output_length INTEGER NOT NULL,
    output_crc32 INTEGER NOT NULL,
    finish_reason TEXT NOT NULL,
    messages TEXT,
    output_text TEXT NOT NULL,
    UNIQUE (conversation, turn)
);
"""

_TURN_COLUMNS = (
    "turn, input_ids, input_length, input_crc32, output_ids, output_length, output_crc32, "
    "finish_reason, messages, output_text"
)

_TOKEN_DTYPE = np.dtype("<i4")

_LOCK_WAIT_S = 1.0
"""How long to wait for another process: enough for one that is just ending."""

_IDS_PER_PAGE = 1000

_ADVICE = {
    sqlite3.SQLITE_NOTADB: "It is not a conversation log. Give another path, or move the file away.",
    sqlite3.SQLITE_CORRUPT: (
        "It is damaged. Put a backup in its place, save what `sqlite3 FILE .recover` can read, or move it "
        "away to start with an empty log."
    ),
    sqlite3.SQLITE_BUSY: "Another process has it open. One engine at a time can use a log.",
    sqlite3.SQLITE_READONLY: "The file or its folder can't be written. Check their permissions.",
    sqlite3.SQLITE_CANTOPEN: "Check that the path is a file and that its folder can be written.",
    sqlite3.SQLITE_IOERR: "Check the permissions of the file and its folder, and the disk.",
    sqlite3.SQLITE_FULL: "The disk is full. Nothing was changed.",
}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnRecord:
    """One finished turn."""

    input_ids: np.ndarray
    """i32[n]: the tokens that the turn added before the answer."""
    output_ids: np.ndarray
    """i32[m]: the answer's tokens, with the end token if there was one."""
    finish_reason: FinishReason
    messages: tuple[Message, ...] | None
    """The messages that the input tokens encode; None if tokens were given."""
    output_text: str
    """The answer as it was given out; empty without a tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConversationRecord:
    """All that the log knows of a conversation."""

    id: str
    created_s: float
    """Seconds since the epoch."""
    parent_id: str | None
    """The conversation that it was forked from, which may be deleted since; None if it wasn't forked."""
    parent_turns: int | None
    """How many turns it shares with its parent."""
    tenant: str
    """Whose conversation it is; "" if nobody was named."""
    turns: tuple[TurnRecord, ...]

    @property
    def token_ids(self) -> np.ndarray:
        """i32[n]: inputs and outputs of all turns, in order."""
        parts = [ids for turn in self.turns for ids in (turn.input_ids, turn.output_ids)]
        return np.concatenate([np.zeros(0, np.int32), *parts])


class ConversationLog:
    """Conversations and their finished turns. All methods may be called from any thread.

    Every method raises `LogError` if the file fails it, with nothing changed, and so does any call after
    `close`. One process at a time has a log file open.
    """

    def __init__(self, connection: sqlite3.Connection, *, name: str, clock: Callable[[], float]) -> None:
        """Not to be called directly: see `open`."""
        self._connection = connection
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls,
        path: Path | None,
        *,
        vocab_size: int,
        model: str,
        fingerprint: str,
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """Opens a log, and creates it if there is no file at `path`.

        Args:
            path: the file; None keeps the log in memory, for as long as it is open. A log of an older version
                is upgraded in place.
            vocab_size: of the model; tokens of another vocabulary mean nothing to it.
            model: its name, for people who look at the file.
            fingerprint: identifies its weights. If they have changed, a log line says so and the new
                fingerprint is recorded; the conversations stay valid.
            clock: seconds since the epoch.

        Raises:
            LogError: the file is not a log, is damaged, is in use, can't be written, or is of another
                vocabulary or version. It is left as it was.
        """
        name = "the log in memory" if path is None else str(path)
        if path is not None:
            _check_path(path)
        try:
            connection = sqlite3.connect(
                ":memory:" if path is None else path.absolute(),
                timeout=_LOCK_WAIT_S,
                isolation_level=None,
                check_same_thread=False,
            )
        except sqlite3.Error as error:
            raise _log_error(name, error) from error
        log = cls(connection, name=name, clock=clock)
        try:
            log._prepare(path, vocab_size=vocab_size, model=model, fingerprint=fingerprint)
        except BaseException:
            connection.close()
            raise
        return log

    def create(self, conversation_id: str, *, tenant: str = "") -> None:
        """Adds a conversation without turns.

        Args:
            conversation_id: a new one.
            tenant: whose conversation it is.

        Raises:
            InvalidArgumentError: there is one of that id.
        """
        with self._transaction() as connection:
            self._insert_conversation(
                connection, conversation_id, tenant=tenant, parent_id=None, parent_turns=None
            )

    def append_turn(self, conversation_id: str, turn: TurnRecord) -> None:
        """Adds a finished turn. It is durable when this returns.

        Raises:
            UnknownConversationError: there is no such conversation.
        """
        messages = turn.messages
        encoded = None
        if messages is not None:
            encoded = json.dumps([{"role": m.role, "content": m.content} for m in messages])
        with self._transaction() as connection:
            number, turns = _find(connection, conversation_id)
            connection.execute(
                f"INSERT INTO turns (conversation, {_TURN_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    number,
                    turns,
                    *_pack(turn.input_ids),
                    *_pack(turn.output_ids),
                    turn.finish_reason.value,
                    encoded,
                    turn.output_text,
                ),
            )

    def load(self, conversation_id: str) -> ConversationRecord:
        """Reads a conversation and checks its tokens.

        Raises:
            UnknownConversationError: there is no such conversation.
            LogError: a turn is damaged. The other conversations are not affected.
        """
        with self._locked() as connection:
            row = connection.execute(
                "SELECT number, created_s, parent_id, parent_turns, tenant FROM conversations WHERE id = ?",
                (conversation_id,),
            ).fetchone()
            if row is None:
                raise _unknown(conversation_id)
            number, created_s, parent_id, parent_turns, tenant = row
            rows = connection.execute(
                f"SELECT {_TURN_COLUMNS} FROM turns WHERE conversation = ? ORDER BY turn", (number,)
            ).fetchall()
        turns = []
        for index, (turn, *columns) in enumerate(rows):
            try:
                if turn != index:
                    raise ValueError(f"turn {turn} stands in its place")
                turns.append(_turn_record(*columns))
            except (ValueError, TypeError, KeyError) as error:
                raise LogError(
                    f"{self._name}: turn {index} of conversation {conversation_id!r} is damaged ({error}). "
                    "Rewind it to before that turn or delete it; other conversations are not affected."
                ) from error
        return ConversationRecord(
            id=conversation_id,
            created_s=created_s,
            parent_id=parent_id,
            parent_turns=parent_turns,
            tenant=tenant,
            turns=tuple(turns),
        )

    def rewind(self, conversation_id: str, num_turns: int) -> None:
        """Removes all turns after the first `num_turns`.

        Raises:
            UnknownConversationError: there is no such conversation.
            InvalidArgumentError: it has fewer turns.
        """
        with self._transaction() as connection:
            number, turns = _find(connection, conversation_id)
            _check_turns(num_turns, turns)
            connection.execute("DELETE FROM turns WHERE conversation = ? AND turn >= ?", (number, num_turns))

    def fork(self, source_id: str, new_id: str, num_turns: int) -> None:
        """Adds a conversation that begins with the first `num_turns` turns of another.

        Raises:
            UnknownConversationError: there is no conversation `source_id`.
            InvalidArgumentError: it has fewer turns, or there is a conversation `new_id`.
        """
        with self._transaction() as connection:
            source, turns = _find(connection, source_id)
            _check_turns(num_turns, turns)
            (tenant,) = connection.execute(
                "SELECT tenant FROM conversations WHERE number = ?", (source,)
            ).fetchone()
            new = self._insert_conversation(
                connection, new_id, tenant=tenant, parent_id=source_id, parent_turns=num_turns
            )
            connection.execute(
                f"INSERT INTO turns (conversation, {_TURN_COLUMNS}) "
                f"SELECT ?, {_TURN_COLUMNS} FROM turns WHERE conversation = ? AND turn < ?",
                (new, source, num_turns),
            )

    def delete(self, conversation_id: str) -> None:
        """Removes a conversation. Its forks stay.

        Raises:
            UnknownConversationError: there is no such conversation.
        """
        with self._transaction() as connection:
            deleted = connection.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))
            if deleted.rowcount == 0:
                raise _unknown(conversation_id)

    def ids(self) -> Iterator[str]:
        """The ids of all conversations, in order of creation.

        They are read as they are asked for, so the log may be used and changed meanwhile.
        """
        last = -1
        while True:
            with self._locked() as connection:
                page = connection.execute(
                    "SELECT number, id FROM conversations WHERE number > ? ORDER BY number LIMIT ?",
                    (last, _IDS_PER_PAGE),
                ).fetchall()
            if not page:
                return
            for _, conversation_id in page:
                yield conversation_id
            last = page[-1][0]

    def close(self) -> None:
        """Ends the use of the file. A second call does nothing."""
        with self._locked() as connection:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _prepare(self, path: Path | None, *, vocab_size: int, model: str, fingerprint: str) -> None:
        with self._locked() as connection:
            # Two engines that append to one log would not see each other's turns: the first keeps it locked.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            # All checks read only, so that a file which turns out to be something else stays as it is.
            is_new = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            meta = {} if is_new else _checked_meta(connection, self._name, vocab_size)
            if path is not None and not is_new:
                _check_size(connection, path)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
        old = meta.get("fingerprint", fingerprint)
        if old != fingerprint:
            _logger.warning(
                "%s: the weights have changed since it was last open (%s %s, now %s %s). Its conversations "
                "go on; their key/value state is computed with the new weights.",
                self._name,
                meta.get("model"),
                old,
                model,
                fingerprint,
            )
        values = {
            "schema_version": str(SCHEMA_VERSION),
            "vocab_size": str(vocab_size),
            "model": model,
            "fingerprint": fingerprint,
        }
        with self._transaction() as connection:
            if is_new:
                for statement in _SCHEMA.split(";"):  # executescript would end the transaction
                    connection.execute(statement)
            elif upgrade := _UPGRADES.get(meta["schema_version"]):
                connection.execute(upgrade)
            connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    def _insert_conversation(
        self,
        connection: sqlite3.Connection,
        conversation_id: str,
        *,
        tenant: str,
        parent_id: str | None,
        parent_turns: int | None,
    ) -> int:
        """Returns its number."""
        if connection.execute("SELECT 1 FROM conversations WHERE id = ?", (conversation_id,)).fetchone():
            raise InvalidArgumentError(f"id: got {conversation_id!r}, expected one that is not in use")
        (number,) = connection.execute(
            "INSERT INTO conversations (id, created_s, parent_id, parent_turns, tenant) "
            "VALUES (?, ?, ?, ?, ?) RETURNING number",
            (conversation_id, self._clock(), parent_id, parent_turns, tenant),
        ).fetchone()
        return number

    @contextmanager
    def _locked(self) -> Iterator[sqlite3.Connection]:
        """The connection, for one thread at a time. SQLite's errors come out as `LogError`."""
        with self._lock:
            try:
                yield self._connection
            except sqlite3.Error as error:
                raise _log_error(self._name, error) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """The connection, with all changes durable at the end of the block, or none if it raises."""
        with self._locked() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise


def _check_path(path: Path) -> None:
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        # SQLite takes an empty file for a new database; that the old one is lost would go unnoticed.
        if path.is_file() and path.stat().st_size == 0:
            raise LogError(
                f"{path}: the file is empty. Put a backup in its place, or delete it to start anew."
            )
    except OSError as error:
        raise LogError(f"{path}: {error.strerror}. Check the path and the folder's permissions.") from error


def _checked_meta(connection: sqlite3.Connection, name: str, vocab_size: int) -> dict[str, str]:
    """The table `meta` of a database that is a log of this vocabulary, of this version or one to upgrade."""
    try:
        meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
            raise
        meta = {}
    if "schema_version" not in meta:
        raise LogError(f"{name}: an SQLite database, but not a conversation log. Give another path.")
    if meta["schema_version"] not in (str(SCHEMA_VERSION), *_UPGRADES):
        raise LogError(
            f"{name}: has schema version {meta['schema_version']}, and this program reads {SCHEMA_VERSION}. "
            "Use the program that wrote it, or give another path."
        )
    if meta.get("vocab_size") != str(vocab_size):
        raise LogError(
            f"{name}: its tokens are of a vocabulary of {meta.get('vocab_size')} (model "
            f"{meta.get('model')!r}), but this model has {vocab_size}. Give another path for this model."
        )
    return meta


def _check_size(connection: sqlite3.Connection, path: Path) -> None:
    """Finds a last page that is cut off, which SQLite reads as if it ended in zeros."""
    write_ahead = path.with_name(path.name + "-wal")
    if write_ahead.exists() and write_ahead.stat().st_size:
        return  # a process was killed while it moved pages from there, where they still are
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    page_bytes = connection.execute("PRAGMA page_size").fetchone()[0]
    size = path.stat().st_size
    if size < pages * page_bytes:
        expected = f"expected {pages * page_bytes} bytes, found {size}"
        raise LogError(f"{path}: the file is cut off ({expected}). {_ADVICE[sqlite3.SQLITE_CORRUPT]}")


def _find(connection: sqlite3.Connection, conversation_id: str) -> tuple[int, int]:
    """A conversation's number, and how many turns it has."""
    row = connection.execute(
        "SELECT number, (SELECT coalesce(max(turn) + 1, 0) FROM turns WHERE conversation = number) "
        "FROM conversations WHERE id = ?",
        (conversation_id,),
    ).fetchone()
    if row is None:
        raise _unknown(conversation_id)
    return row


def _check_turns(num_turns: int, turns: int) -> None:
    if not 0 <= num_turns <= turns:
        raise InvalidArgumentError(f"num_turns: got {num_turns}, expected 0 to {turns}, the turns there are")


def _unknown(conversation_id: str) -> UnknownConversationError:
    return UnknownConversationError(f"conversation {conversation_id!r}: there is none of this id")


def _log_error(name: str, error: sqlite3.Error) -> LogError:
    # Errors of the module itself, such as the use of a closed connection, have no code.
    code = getattr(error, "sqlite_errorcode", None)
    advice = "" if code is None else _ADVICE.get(code & 0xFF, "")
    return LogError(f"{name}: {error}. {advice}".rstrip())


def _pack(token_ids: np.ndarray) -> tuple[bytes, int, int]:
    """The bytes of the tokens, their number, and the checksum."""
    blob = np.asarray(token_ids).astype(_TOKEN_DTYPE, casting="same_kind").tobytes()
    return blob, len(token_ids), zlib.crc32(blob)


def _unpack(blob: bytes, length: int, crc32: int) -> np.ndarray:
    """i32[length]. Raises ValueError or TypeError if the bytes are not those that were stored."""
    if len(blob) != length * _TOKEN_DTYPE.itemsize:
        raise ValueError(f"{len(blob)} bytes for {length} tokens")
    if zlib.crc32(blob) != crc32:
        raise ValueError("the checksum does not fit its tokens")
    return np.frombuffer(blob, _TOKEN_DTYPE).astype(np.int32)


def _turn_record(
    input_ids: bytes,
    input_length: int,
    input_crc32: int,
    output_ids: bytes,
    output_length: int,
    output_crc32: int,
    finish_reason: str,
    messages: str | None,
    output_text: str,
) -> TurnRecord:
    """Raises ValueError, TypeError or KeyError if a column does not hold what was stored."""
    return TurnRecord(
        input_ids=_unpack(input_ids, input_length, input_crc32),
        output_ids=_unpack(output_ids, output_length, output_crc32),
        finish_reason=FinishReason(finish_reason),
        messages=None if messages is None else tuple(Message(**item) for item in json.loads(messages)),
        output_text=output_text,
    )
