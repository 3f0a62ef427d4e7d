"""Factories for ``CustomRecipe`` under TransformerEngine's names.

>>> import nvfp4.te as te
>>> from nvfp4.te.custom_recipes.quantizer_factories import nvfp4_factory
>>> te.CustomRecipe(qfactory=nvfp4_factory).recipe().spec("fc", "weight")
'nvfp4(16x16)'
"""

from . import quantizer_factories, quantizer_factory_zoo

__all__ = ["quantizer_factories", "quantizer_factory_zoo"]
