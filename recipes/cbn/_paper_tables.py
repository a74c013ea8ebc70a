"""Tables 1 to 4 of the CBN paper: test accuracy in %, mean and deviation of 10 trials.

The rows are 1 (BN), 2 (CBN) and 3 to 7. CBN with SELU in Table 1 is not legible in the
copy that was read: it is the row above plus the printed improvement, 1.88.

Reference: Peng, Yu and Yu, Re-Thinking the Effectiveness of Batch Normalization and
Beyond, TPAMI 2023. https://doi.org/10.1109/TPAMI.2023.3319005
"""

ACTIVATIONS = ("sigmoid", "tanh", "relu", "selu", "swish")
TITLES = {
    1: "Table 1, ResNet-20 on CIFAR-10",
    2: "Table 2, VGG-16 on CIFAR-10",
    3: "Table 3, ResNet-20 on CIFAR-100",
    4: "Table 4, VGG-16 on CIFAR-100",
}
# A line a row, a mean and a deviation for each activation.
NUMBERS = {
    1: """
        78.97 0.53   87.59 0.12   91.13 0.09   89.69 0.11   91.24 0.11
        91.20 0.06   91.73 0.07   91.98 0.06   91.57 nan    92.16 0.04
        88.78 0.11   89.85 0.06   91.27 0.16   91.08 0.16   91.72 0.13
        89.75 0.13   91.29 0.05   91.50 0.11   91.17 0.04   91.89 0.06
        90.93 0.11   91.39 0.10   91.58 0.07   91.45 0.12   91.93 0.08
        79.75 0.21   87.64 0.08   91.53 0.18   90.13 0.06   91.32 0.11
        80.27 0.16   87.77 0.06   91.67 0.08   90.31 0.04   91.52 0.09
    """,
    2: """
        82.38 0.56   88.80 0.08   93.12 0.09   89.60 0.05   92.58 0.11
        92.66 0.08   92.94 0.08   93.86 0.06   93.81 0.08   94.07 0.07
        91.40 0.16   92.81 0.08   93.24 0.05   93.02 0.08   93.48 0.06
        92.13 0.10   92.77 0.11   93.32 0.13   93.21 0.05   93.63 0.11
        92.31 0.11   92.85 0.13   93.51 0.11   93.44 0.12   93.71 0.13
        86.57 0.11   89.70 0.09   93.44 0.06   89.86 0.09   92.76 0.11
        86.69 0.08   89.84 0.06   93.63 0.05   89.98 0.05   92.90 0.12
    """,
    3: """
        46.05 0.20   63.15 0.09   67.21 0.12   63.81 0.14   67.82 0.10
        66.92 0.08   67.13 0.07   68.55 0.05   67.43 0.08   69.52 0.16
        65.06 0.09   66.42 0.11   66.78 0.12   66.13 0.09   67.25 0.12
        66.64 0.08   66.24 0.10   67.90 0.08   66.22 0.16   68.31 0.13
        66.82 0.11   67.13 0.15   68.28 0.09   66.40 0.09   69.17 0.15
        48.82 0.24   63.26 0.14   67.38 0.11   65.03 0.14   67.93 0.10
        49.88 0.15   63.45 0.10   67.51 0.09   65.25 0.08   68.01 0.11
    """,
    4: """
        60.37 0.10   66.54 0.15   72.56 0.07   65.52 0.17   71.78 0.08
        72.41 0.07   72.12 0.08   73.72 0.06   71.39 0.07   73.93 0.08
        70.03 0.10   70.89 0.09   72.09 0.07   70.18 0.11   72.15 0.10
        71.01 0.08   71.16 0.10   72.86 0.09   70.27 0.17   72.79 0.11
        71.44 0.11   71.53 0.12   73.45 0.12   70.60 0.09   73.11 0.12
        63.33 0.19   66.89 0.17   72.77 0.14   66.57 0.25   71.97 0.15
        64.09 0.08   66.98 0.08   72.91 0.06   66.80 0.15   72.05 0.08
    """,
}


def _parse(text):
    rows = [
        [float(word) for word in line.split()] for line in text.strip().splitlines()
    ]
    return {
        activation: [(row[2 * i], row[2 * i + 1]) for row in rows]
        for i, activation in enumerate(ACTIVATIONS)
    }


# Number of a table: its title, and a dict from each activation to its seven rows.
TABLES = {number: (TITLES[number], _parse(text)) for number, text in NUMBERS.items()}
