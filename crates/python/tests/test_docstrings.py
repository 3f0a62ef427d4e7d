"""Examples in docstrings run."""

import doctest

import pytest

import nvfp4


@pytest.mark.parametrize("thing", [nvfp4, nvfp4.quantize, nvfp4.Quantizer, nvfp4.Recipe, nvfp4.Plan, nvfp4.Delayed], ids=lambda t: t.__name__)
def test_examples(thing):
    test = doctest.DocTestParser().get_doctest(thing.__doc__, {}, thing.__name__, None, 0)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0
