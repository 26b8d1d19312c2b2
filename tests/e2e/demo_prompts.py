"""Prompts for the demo target: conversations, code, edits that copy most of the prompt, and non-Latin text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FUNCTION = """def count_words(text, stop_words):
    counts = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?")
        if not word or word in stop_words:
            continue
        counts[word] = counts.get(word, 0) + 1
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
"""
TABLE = """| city | opened | length | stations |
|---|---|---|---|
| London | 1863 | 402 km | 272 |
| Budapest | 1896 | 39 km | 52 |
| Glasgow | 1896 | 10 km | 15 |
| Paris | 1900 | 226 km | 308 |
| Berlin | 1902 | 155 km | 175 |
| New York | 1904 | 399 km | 472 |
"""
STORY = (
    "The ferry left the harbour at six in the morning, when the lamps on the quay were still burning. Marta stood at "
    "the rail with her brother's coat over her shoulders and counted the gulls. Her brother had said that a ferry "
    "always has one gull for every ten passengers, and that a captain who sees fewer turns back. She counted eleven. "
    "Behind her an old man was selling tea from a copper can, and the steam smelled of oranges. When the island came "
    "into sight she knew it at once by the white chapel on the hill, although nobody had ever described it to her. "
)


@dataclass(frozen=True)
class DemoPrompt:
    """A prompt as `Session.generate` takes it, and its name for test ids."""

    name: str
    prompt: str | Sequence[Mapping[str, str]]


def _chat(name: str, *turns: str, system: str | None = None) -> DemoPrompt:
    """User turns and answers in alternation."""
    messages = [{"role": "system", "content": system}] if system else []
    for index, turn in enumerate(turns):
        messages.append({"role": "assistant" if index % 2 else "user", "content": turn})
    return DemoPrompt(name, messages)


# The order mixes kinds and lengths, so that any four neighbours make an uneven batch.
PROMPTS = [
    _chat("chat_bread", "Why does bread rise?"),
    _chat("edit_rename", f"```python\n{FUNCTION}```\nRename `counts` to `totals` and write the whole function again."),
    DemoPrompt("raw_chinese", "北京是中国的首都。上海是中国最大的城市。"),
    DemoPrompt("raw_one_token", "The"),
    _chat("chat_list", "List twelve animals, one per line, each with its favourite food."),
    DemoPrompt(
        "code_class", '"""A stack."""\n\n\nclass Stack:\n    def __init__(self):\n        self.items = []\n\n    def'
    ),
    _chat("chat_russian", "Расскажи коротко, почему небо голубое."),
    _chat("edit_table", f"{TABLE}\nSort this table by the number of stations and write it out again."),
    DemoPrompt("raw_emoji", "🍎🍌🍇🍎🍌🍇🍎🍌🍇 👩‍👩‍👧‍👦 👍🏽 🇫🇷"),
    _chat("chat_system", "How do I boil an egg?", system="You are a pirate. Answer in three sentences."),
    DemoPrompt("code_sql", "-- Orders of each customer in 2024\nSELECT customers.name, COUNT(*)\nFROM customers\nJOIN"),
    _chat("edit_spelling", f"Write this text again without any change:\n\n{STORY}"),
    _chat("chat_arabic", "اكتب جملة قصيرة عن البحر."),
    DemoPrompt("raw_story", STORY),
    _chat("chat_turns", "My name is Ida.", "Hello Ida! How can I help you?", "What is my name, and how is it spelled?"),
    DemoPrompt("code_json", '[\n  {"id": 1, "name": "Anna", "age": 31},\n  {"id": 2, "name": "Bert", "age": 27},\n  {'),
    _chat("chat_japanese", "日本の四季について一つの段落で説明してください。"),
    DemoPrompt("raw_repeats", "one two three four five " * 12),
    _chat("chat_math", "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Show each step."),
    DemoPrompt(
        "code_comment", f"{FUNCTION}\n\n# The same function with type annotations:\n{FUNCTION.splitlines()[0][:15]}"
    ),
    DemoPrompt("raw_hindi", "भारत एक विशाल देश है। यहाँ कई भाषाएँ बोली जाती हैं।"),
    _chat(
        "edit_json",
        'Add "country": "DE" to this object and write it again: {"city": "Ulm", "zip": "89073", "open": true}',
    ),
    _chat("chat_long", f"{STORY * 3}\n\nSummarise the text, and quote its first sentence word for word."),
    DemoPrompt("raw_mixed", "Größe: 10 µm; цена: 5 €; 値段: 3円; ñandú; \u200bzero\twidth\r\nlines ∑∫√ ½ — “quotes”…"),
]
