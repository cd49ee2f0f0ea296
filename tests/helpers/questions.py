# SPDX-License-Identifier: Apache-2.0
"""A task for lm-evaluation-harness from the text of this machine: how does a documented sentence go on?

One right continuation of 40 characters and three of other documents: chance is 25 %.
"""

import json
from collections.abc import Sequence
from pathlib import Path

NAME = "how_it_goes_on"
_CONTEXT, _CONTINUATION, _CHOICES = 120, 40, 4


def write_task(folder: Path, texts: Sequence[str], count: int) -> list[dict]:
    """The task's definition and data in `folder`; the questions."""
    flat = (" ".join(text.split()) for text in texts)
    cuts = [(text, text.find(" ", _CONTEXT)) for text in flat if len(text) > 2 * (_CONTEXT + _CONTINUATION)]
    pieces = [(text[:cut], text[cut : cut + _CONTINUATION]) for text, cut in cuts]  # the space begins what follows
    assert len(pieces) >= _CHOICES, "too few long documents"
    questions = []
    for number in range(count):
        context, right = pieces[number % len(pieces)]
        wrong = [pieces[(number + step) % len(pieces)][1] for step in range(1, _CHOICES)]
        place = number % _CHOICES
        questions.append({"context": context, "choices": [*wrong[:place], right, *wrong[place:]], "answer": place})
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    (folder / f"{NAME}.yaml").write_text(f"""\
task: {NAME}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
target_delimiter: ""
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
metadata:
  version: 1.0
""")
    return questions
