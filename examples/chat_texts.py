"""What the chat demo says: a system prompt that all sessions share, one long document each, a question a turn.

Everything is kept as token ids.  The next prompt is the previous ids and the new message; text that was generated is never
tokenised again, for the ids could then differ from those whose KV is cached.
"""

from __future__ import annotations

import pydoc_data.topics
from typing import Any, Protocol

SYSTEM = (
    "You are the documentation assistant of a Python team. Answer from the document only. Be brief and exact; name the section "
    "you used. If the document does not say it, say so. Never invent function names. Write plain English sentences, no lists, "
    "no code. Give the most important fact first. Mention limits and exceptions when the document states them. Do not repeat "
    "the question. Keep each answer below forty words. When two sections disagree, prefer the later one and say that they "
    "disagree. When the question is unclear, answer the most likely meaning and state which one you chose. Quote short phrases "
    "only, and only when the exact wording matters. If a version of Python is named, repeat it in the answer."
)
TOPICS = ("assignment", "compound", "formatstrings", "specialnames", "typesseq", "types")
QUESTIONS = (
    "What is this document about?",
    "Name one important rule that the document states.",
    "Which exceptions or errors does it mention?",
    "Summarise the most surprising detail in one sentence.",
)


class Tokenizer(Protocol):
    end: int
    """The id that ends a message."""

    def encode(self, text: str, *, markup: bool) -> list[int]:
        """``markup``: whether ``<|im_start|>`` and ``<|im_end|>`` in ``text`` are meant, or are just text (in a document)."""

    def decode(self, ids: list[int]) -> str: ...


class HuggingFaceTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.end: int = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def encode(self, text: str, *, markup: bool) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=not markup)["input_ids"]
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


class ToyTokenizer:
    """Numbers runs of four characters as it meets them: as many tokens as a real one makes of English, and no meaning."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._runs = ["<|im_end|>"]
        self._ids: dict[str, int] = {}
        self.end = 0

    def encode(self, text: str, *, markup: bool) -> list[int]:
        return [self._id(text[i : i + 4]) for i in range(0, len(text), 4)]

    def _id(self, run: str) -> int:
        if run not in self._ids and len(self._runs) < self._vocabulary:
            self._ids[run] = len(self._runs)
            self._runs.append(run)
        return self._ids.get(run, self._vocabulary - 1)

    def decode(self, ids: list[int]) -> str:
        return "".join(self._runs[i] if i < len(self._runs) else "?" for i in ids)


class Chats:
    """Sessions by letter: A has the first document, B the second, and so on."""

    def __init__(self, tokenizer: Tokenizer, document_tokens: int) -> None:
        self.tokenizer, self.document_tokens = tokenizer, document_tokens
        self._so_far: dict[str, list[int]] = {}

    def prompt(self, session: str, turn: int) -> list[int]:
        """Token ids of a session's ``turn``-th prompt (from 1), the whole conversation before it included."""
        question = f"{QUESTIONS[(turn - 1) % len(QUESTIONS)]}<|im_end|>\n<|im_start|>assistant\n"
        if turn > 1:
            return self._so_far[session] + self._markup(f"\n<|im_start|>user\n{question}")
        start = self._markup(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nDocument:\n")
        return start + self._document(session) + self._markup(f"\n\n{question}")

    def answered(self, session: str, prompt: list[int], answer: list[int]) -> None:
        """Note what was generated; an answer that was cut short is closed, so that the next message starts cleanly."""
        end = self.tokenizer.end
        self._so_far[session] = prompt + answer + ([] if answer[-1] == end else [end])

    def _markup(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, markup=True)

    def _document(self, session: str) -> list[int]:
        text = pydoc_data.topics.topics[TOPICS[ord(session) - ord("A")]]
        ids = self.tokenizer.encode(text[: 16 * self.document_tokens], markup=False)[: self.document_tokens]
        if len(ids) < self.document_tokens:
            raise SystemExit(f"the document of session {session} has {len(ids)} tokens only; lower --doc-tokens")
        return ids
