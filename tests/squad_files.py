"""SQuAD files for tests: an excerpt, those of --data-dir, and small ones made up."""

import pathlib

EXCERPT = pathlib.Path(__file__).parent / "squad" / "v1.1_excerpt.json"
CONTEXT = "Each worker sends one bit a parameter. The scale is sent beside it."


def answer(text, context=CONTEXT):
    return {"text": text, "answer_start": context.index(text)}


def question(name, *texts, context=CONTEXT, **more):
    answers = [answer(text, context) for text in texts]
    return {"id": name, "question": f"What is {name}?", "answers": answers, **more}


def content(*qas, context=CONTEXT):
    paragraph = {"context": context, "qas": list(qas)}
    return {"version": "1.1", "data": [{"title": "T", "paragraphs": [paragraph]}]}


def unanswerable(name):
    return question(name, is_impossible=True)


def answerable(name, *texts):
    return question(name, *texts, is_impossible=False)
