"""Makes src/paceline/workloads/data/digits.bin.xz from the copy of the digits that scikit-learn ships.

Needs scikit-learn, which the package does not; run once, in an environment of its own:

    python3 -m venv /tmp/digits && /tmp/digits/bin/pip install scikit-learn
    /tmp/digits/bin/python tools/make_digits.py
"""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

FOLDER = Path(__file__).resolve().parents[1] / "src/paceline/workloads/data"

ABOUT = """\
digits.bin.xz: handwritten digits, 8x8
======================================
Source       "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, the 1,797 samples of its test
             part (optdigits.tes), as scikit-learn ships them (sklearn.datasets.load_digits)
Authors      E. Alpaydin and C. Kaynak, 1998
DOI          10.24432/C50P49
Licence      Creative Commons Attribution 4.0 International (CC BY 4.0), https://creativecommons.org/licenses/by/4.0/
Changes      only the file format; paceline scales the images up to 3x32x32 when it loads them
Format       xz-compressed rows, in the source's order, of 1 label byte (0..9) and 64 pixel bytes (0..16, row by row)
sha256       {sha256} (of the decompressed rows)
Made by      tools/make_digits.py
"""


def main() -> None:
    """Writes the rows and the text that goes with them."""
    digits = load_digits()
    rows = np.column_stack([digits.target, digits.images.reshape(-1, 64)])
    assert rows.shape == (1797, 65)
    assert (rows == rows.astype(np.uint8)).all(), "the values are whole numbers"
    content = rows.astype(np.uint8).tobytes()
    sha256 = hashlib.sha256(content).hexdigest()
    (FOLDER / "digits.bin.xz").write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    (FOLDER / "digits.txt").write_text(ABOUT.format(sha256=sha256))
    print(f"sha256 of the rows, for digits.py: {sha256}")


if __name__ == "__main__":
    main()
