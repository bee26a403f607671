"""What is told of a run's steps."""

from laminar.controller.watches import NO_SIGNAL_STEPS, LearningSignal


def told(*fractions: float) -> list[str]:
    """The alarms of steps with these shares of groups without an advantage."""
    alarms: list[str] = []
    signal = LearningSignal(lambda name, text: alarms.append(f"{name}: {text}"))
    for fraction in fractions:
        signal.on_step({"advantage/zero_fraction": fraction, "reward/mean": 0.0})
    return alarms


def test_steps_in_a_row_in_which_no_group_differs_are_told_once() -> None:
    [alarm] = told(*[1.0] * (NO_SIGNAL_STEPS + 4))
    assert alarm.startswith("no-learning-signal: in 3 steps in a row all answers to a prompt had the same reward")
    assert "look at task.reward" in alarm


def test_a_step_with_a_group_that_differs_begins_the_count_again() -> None:
    assert told(*[1.0] * (NO_SIGNAL_STEPS - 1), 0.99, *[1.0] * (NO_SIGNAL_STEPS - 1)) == []
    assert len(told(*[1.0] * NO_SIGNAL_STEPS, 0.5, *[1.0] * NO_SIGNAL_STEPS)) == 2
