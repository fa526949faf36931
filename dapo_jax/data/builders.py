"""TFDS builders of the published data sets, from files that lie on disk.

What is built are ArrayRecord files, which are read at random without TensorFlow: by this system,
or by `tensorflow_datasets.builder_from_directory(FOLDER).as_data_source("train")`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow_datasets as tfds

from dapo_jax.data import formats

Placed = Iterable[formats.Record]


class Problems(tfds.core.GeneratorBasedBuilder):
    """Records of `prompt` (a text, or chat messages as JSON) and `answer`; all of a record as
    JSON beside them. A class, as TFDS wants one in a package; `splits` is all that it adds."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, name: str, splits: Mapping[str, Placed], **settings: Any) -> None:
        self.name = name
        self._splits = splits
        super().__init__(file_format="array_record", **settings)

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        return self.dataset_info_from_configs(
            description=f"Problems and answers; layout: {formats.FORMATS[self.name].about}"
            if self.name in formats.FORMATS else "Problems and answers",
            features=tfds.features.FeaturesDict(
                {"prompt": text, "answer": text, formats.BUILT: text}),
            disable_shuffling=True)

    def _split_generators(self, downloads: Any) -> dict[str, Iterator]:
        return {split: self._generate_examples(records)
                for split, records in self._splits.items()}

    def _generate_examples(self, records: Placed) -> Iterator[tuple[int, dict[str, str]]]:
        for number, record in enumerate(records):
            prompt = record["prompt"]
            yield number, {
                "prompt": prompt if isinstance(prompt, str) else json.dumps(prompt,
                                                                            ensure_ascii=False),
                "answer": record["answer"],
                formats.BUILT: json.dumps(record, ensure_ascii=False)}
