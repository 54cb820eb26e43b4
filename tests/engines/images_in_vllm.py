"""Run image tests with vLLM in a separate process, since it reads its environment variables when imported.

python images_in_vllm.py FOLDER KIND
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlsdk.contracts import ActorSpec
from rlsdk.engines.vllm import Vllm

os.environ.update(Vllm().environment(ActorSpec(role="engine")))

from tests.engines import test_vision as images


def main(folder: Path, kind: str) -> None:
    """Run the tests that ask the engine."""
    images.ENGINE = Vllm
    for test in (
        images.test_engine_learner_and_transformers_agree_in_a_conversation_with_images,
        images.test_an_image_token_that_the_policy_samples_is_text,
        images.test_requests_with_images_and_without_share_a_batch_and_go_on_with_new_weights,
    ):
        made = folder / test.__name__
        made.mkdir()
        test(made, kind)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
