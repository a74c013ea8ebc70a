"""What `convert` did to layers, and how it says so."""


class Report:
    """What becomes of layers, by name.

    Two have units instead: `new`, norms with moving statistics, each with the map that
    it must be at inference and the `Statistics` of its input; and `unknown`, new
    BatchNormalization without statistics.
    """

    def __init__(self):
        self.new, self.unknown = {}, []
        self.no_place = []  # models that got none of the new norms
        self.there = []  # CBN with other settings than the new ones
        self.beside = []  # other norms than BatchNormalization in a model with new CBN
        self.fresh = []  # BatchNormalization that has seen no batch
        self.lost = []  # BatchNormalization that no CBN replaces
        self.changed = []  # the function
        self.unwrapped = []  # layers that WS, CWN or WN cannot wrap
        self.empty = []  # norms without statistics
        self.kept = []  # norms that the new one cannot replace
        self.hidden = []  # norms that cannot be seen or understood

    def parts(self, cls):
        """Texts for a warning, each with its names. `cls` is that of the new norms."""
        return {
            f"Found no place for {getattr(cls, '__name__', None)} in model {{}}.": (
                self.no_place
            ),
            "Existing CBN layers keep their settings: {}.": self.there,
            "Other norms stay beside the new CBN layers: {}.": self.beside,
            "These have seen no batch: {}. If the model is not trained, pass "
            "preserve=False: a CBN that keeps its function hardly normalises at first, "
            "and it may not learn.": self.fresh,
            "No CBN replaces {}, which no layer with a kernel reads. To keep them, "
            "name them in `skip`.": self.lost,
            "The function could not be preserved. These layers change it: {}.": (
                self.changed
            ),
            "These layers cannot be wrapped and stay: {} (units of one weight, LoRA, "
            "quantization, FusedCBN, or a class that overrides the kernel).": (
                self.unwrapped
            ),
            "The moving statistics of {} are unknown, and the first training step "
            "changes the function. Pass `data` to measure them, or preserve=False to "
            "train from scratch.": [] if self.fresh else self.empty,
            "These stay as they are: {}. They have another axis than the channels, an "
            "explicit mask or training=True, or the new norm would normalise single "
            "numbers.": self.kept,
            "These stay as they are: {}. They are inside other layers, or of a class "
            "that overrides `call`.": self.hidden,
        }
