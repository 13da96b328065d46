"""The questions that show what can be asked."""

from types import SimpleNamespace

from realm.questions import MadeQuestion
from realm.workspace.examples import right_first


def test_questions_that_are_answered_as_expected_come_first_and_guesses_do_not_count() -> None:
    said = {"a": ("1492", True), "b": ("Arden", True), "c": ("the Ouse", False), "d": ("the Ouse", True)}
    expected = {"a": "1066", "b": "Arden", "c": "Ouse", "d": "Ouse"}
    asked = [MadeQuestion(name, name, (answer,), "p", name, "", 0, 1) for name, answer in expected.items()]

    def answer_batch(questions: list[str], method: str | None) -> list[SimpleNamespace]:
        found = [said[name] for name in questions]
        return [SimpleNamespace(found=sure, answers=[SimpleNamespace(text=text)]) for text, sure in found]

    chosen = right_first(SimpleNamespace(answer_batch=answer_batch), asked)
    assert [made.id for made, _ in chosen] == ["b", "d", "a", "c"]
    assert [answers.answers[0].text for _, answers in chosen] == ["Arden", "the Ouse", "1492", "the Ouse"]
