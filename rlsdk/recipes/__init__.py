"""Recipes: trainings with everything that they need, and what came out of them when they were run.

Each recipe is a folder beside this file:

* `recipe.yaml`: what it is about, its stages, the accuracy that is expected (`catalogue.Recipe`);
* `config.yaml`, and a configuration for each stage before it;
* `README.md`: what is taught, what is found, how to read the figures;
* `curve.json` and `transcript.txt`: what was measured, and samples of it, written by `tools/recipes.py`; a recipe that
  was never run has neither;
* Python files: plugins that its configurations name.
"""
