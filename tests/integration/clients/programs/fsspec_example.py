"""pandas, pyarrow and Hugging Face's datasets on `kvfs://`: written, read again and compared.

    pip install 'kvfs[fsspec]' && pip install --no-deps -r ../requirements-fsspec.txt
    python fsspec_example.py kvfs://models/tables [--store DIRECTORY]

Ends with 0 when everything came back as it was written. Nothing but `kvfs://` is said to the
libraries; `--store` is for a store that is not the one that `kvfs up` would use.
"""

import argparse
import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HOME", tempfile.mkdtemp(prefix="kvfs-example-"))

import datasets
import fsspec
import pandas
import pyarrow
import pyarrow.compute
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet

ROWS = 200_000


def table() -> pandas.DataFrame:
    return pandas.DataFrame(
        {
            "number": range(ROWS),
            "part": [n % 4 for n in range(ROWS)],
            "text": [f"row {n}" for n in range(ROWS)],
        }
    )


def with_pandas(where: str, options: dict[str, str]) -> None:
    frame = table()
    frame.to_parquet(f"{where}/a.parquet", storage_options=options)
    found = pandas.read_parquet(f"{where}/a.parquet", storage_options=options)
    pandas.testing.assert_frame_equal(found, frame)
    columns = pandas.read_parquet(f"{where}/a.parquet", columns=["part"], storage_options=options)
    pandas.testing.assert_frame_equal(columns, frame[["part"]])
    for name in ("a.csv", "b.csv.gz"):
        frame.head(1000).to_csv(f"{where}/{name}", index=False, storage_options=options)
        found = pandas.read_csv(f"{where}/{name}", storage_options=options)
        pandas.testing.assert_frame_equal(found, frame.head(1000), check_dtype=False)


def with_pyarrow(where: str, options: dict[str, str]) -> None:
    fs, path = fsspec.core.url_to_fs(where, **options)
    home = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fs))
    whole = pyarrow.Table.from_pandas(table())
    pyarrow.dataset.write_dataset(
        whole,
        f"{path}/dataset",
        filesystem=home,
        format="parquet",
        partitioning=["part"],
        partitioning_flavor="hive",
    )
    found = pyarrow.dataset.dataset(f"{path}/dataset", filesystem=home, partitioning="hive")
    assert found.count_rows() == ROWS
    part = found.to_table(filter=pyarrow.compute.field("part") == 3)
    assert sorted(part["number"].to_pylist()) == list(range(3, ROWS, 4))
    pyarrow.parquet.write_table(whole, f"{path}/b.parquet", filesystem=home)
    assert pyarrow.parquet.read_table(f"{path}/b.parquet", filesystem=fs).equals(whole)


def with_datasets(where: str, options: dict[str, str]) -> None:
    made = datasets.Dataset.from_pandas(table().head(5000))
    made.save_to_disk(f"{where}/saved", storage_options=options)
    found = datasets.load_from_disk(f"{where}/saved", storage_options=options)
    assert found[:] == made[:]
    streamed = datasets.load_dataset(
        "parquet",
        data_files=f"{where}/a.parquet",
        storage_options=options,
        streaming=True,
        split="train",
    )
    # To its end: pyarrow reads ahead in threads, and one that still reads from an object of Python
    # when the interpreter ends takes the process with it.
    last = [row["text"] for row in streamed.skip(ROWS - 2)]
    assert last == [f"row {ROWS - 2}", f"row {ROWS - 1}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Tables on kvfs://.")
    parser.add_argument("where")
    parser.add_argument("--store")
    given = parser.parse_args()
    options = {"store": given.store} if given.store else {}
    fsspec.core.url_to_fs(given.where, **options)[0].makedirs(given.where, exist_ok=True)
    for name, work in (
        (f"pandas {pandas.__version__}", with_pandas),
        (f"pyarrow {pyarrow.__version__}", with_pyarrow),
        (f"datasets {datasets.__version__}", with_datasets),
    ):
        work(given.where, options)
        print(f"{name}: everything came back")


if __name__ == "__main__":
    main()
