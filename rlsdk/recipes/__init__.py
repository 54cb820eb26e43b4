"""Recipes: complete training runs, with their measured results.

Each recipe is a folder next to this file:

* `recipe.yaml`: description, stages, expected accuracy (`catalogue.Recipe`);
* `config.yaml`, and one configuration for each earlier stage;
* `README.md`: what is taught, what is found, how to read the numbers;
* `curve.json` and `transcript.txt`: measurements and samples, written by `tools/recipes.py`; missing if the recipe was
  never run;
* Python files: plugins named by its configurations.
"""
