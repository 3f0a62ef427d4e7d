"""Docstrings: examples run, and signatures are said once."""

import doctest
import inspect

import pytest

import nvfp4


@pytest.mark.parametrize("thing", [nvfp4, nvfp4.quantize, nvfp4.Quantizer, nvfp4.Recipe, nvfp4.Plan, nvfp4.Delayed], ids=lambda t: t.__name__)
def test_examples(thing):
    test = doctest.DocTestParser().get_doctest(thing.__doc__, {}, thing.__name__, None, 0)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def everything():
    """All that the package offers, and the methods of its classes."""
    for name in nvfp4.__all__:
        thing = getattr(nvfp4, name)
        yield name, thing
        if inspect.isclass(thing):
            yield from ((f"{name}.{part}", getattr(thing, part)) for part in vars(thing) if not part.startswith("_"))


def test_help_begins_with_a_sentence():
    """A signature in the text would be shown twice: `help` knows it from the function itself."""
    for name, thing in everything():
        assert thing.__doc__ and "\n--\n" not in thing.__doc__, name
