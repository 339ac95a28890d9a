"""What an input of a node will be when the graph runs, as far as that is known before.

Known are widgets, primitives, and what stock's own nodes work out from such: they are run here, on
numbers, and on pictures that have a size and no pixels. Nothing is guessed: what another pack's
node, a model or a file that is missing decides is `Unknown`, with the node that it is about.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from . import expressions, input_files
from .prompt import IMAGE, Kind, Output, Prompt, Unknown, is_link, output_of
from .time_limit import OutOfTime

CONSTANTS = ("PrimitiveInt", "PrimitiveFloat", "PrimitiveBoolean", "PrimitiveString", "PrimitiveStringMultiline")
# Stock's nodes that are run: what they give follows from numbers and from sizes of pictures.
RUN = (
    "BatchImagesNode",
    "ComfyAndNode",
    "ComfyMathExpression",
    "ComfyNotNode",
    "ComfyNumberConvert",
    "ComfyOrNode",
    "CustomCombo",
    "ImageBatch",
    "ImageCrop",
    "ImageFromBatch",
    "ImageScale",
    "ImageScaleBy",
    "ImageScaleToMaxDimension",
    "ImageScaleToTotalPixels",
    "ImageStitch",
    "RepeatImageBatch",
    "ResizeImageMaskNode",
    "ResolutionSelector",
    "SeedVR2Preprocess",
)
# Of those nodes, and of those that load a file, the ones whose texts decide; the page tells only these (web/js/open_graph.js).
TEXTS = (
    "ComfyMathExpression",
    "CustomCombo",
    "ImageScale",
    "ImageScaleBy",
    "ImageScaleToMaxDimension",
    "ImageScaleToTotalPixels",
    "ImageStitch",
    "LoadImage",
    "LoadVideo",
    "ResizeImageMaskNode",
    "ResolutionSelector",
)
# Pictures of the size of the one that they are made of.
SAME_SIZE = ("Canny", "ImageBlur", "ImageInvert", "ImageSharpen", "JoinImageWithAlpha", "PreviewImage")
FORMULA = "ComfyMathExpression"
DECODES = ("VAEDecode", "VAEDecodeTiled")
# Outputs that hand an input on, by their place.
HANDS_ON: Mapping[str, Mapping[int, str]] = {"WanCameraEmbedding": {1: "width", 2: "height", 3: "length"}}
# Stock's switches: the input that decides, and what is passed on if that is false and if it is true.
SWITCHES = {
    "ComfySwitchNode": ("switch", "on_false", "on_true"),
    "ComfySoftSwitchNode": ("switch", "on_false", "on_true"),
}
SOFT = "ComfySoftSwitchNode"  # passes on the other input where one is not there
# A way to scale that needs pixels, and one to the same size that needs none.
NEEDS_PIXELS, NEEDS_NONE = "lanczos", "area"
KONTEXT = ("PREFERRED_KONTEXT_RESOLUTIONS", "PREFERED_KONTEXT_RESOLUTIONS")  # stock's table, in both its spellings
DEEP = 50  # nodes one behind the other: more go round in a circle
LARGEST = 2**53  # of a number; the page's are whole up to here

log = logging.getLogger("fusestream.estimate")


Decoded = Callable[[str], tuple[int, int, int]]


class Values:
    """Of one graph. Each node is worked out once."""

    def __init__(self, prompt: Prompt, kinds: Mapping[str, Kind], decoded: Decoded | None = None) -> None:
        """decoded: count, height and width of the pictures that a node decodes; None: nobody tells."""
        self._prompt, self._kinds, self._decoded = prompt, kinds, decoded
        self._known: dict[str, tuple[Any, ...] | Unknown] = {}
        self._depth = 0

    def input(self, node: str, name: str, default: Any = None) -> Any:
        """The value that this input will have. Raises `Unknown`."""
        value = self._prompt[node]["inputs"].get(name, default)
        if not is_link(value) or str(value[0]) not in self._prompt:
            return value
        try:
            return self.output(output_of(value))
        except Unknown as reason:  # is told by what is asked for
            raise Unknown(reason.key, reason.node, **reason.values | {"what": name}) from None

    def number(self, node: str, name: str, default: float | None = None) -> float:
        """The number that this input will have. Raises `Unknown`."""
        value = self.input(node, name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Unknown("noValue", node, what=name)
        if not abs(value) <= LARGEST:  # infinite, or JSON's NaN
            raise Unknown("noValue", node, what=name)
        return value

    def size(self, node: str, name: str) -> tuple[int, int, int]:
        """Count, height and width of the pictures that this input will have. Raises `Unknown`."""
        shape = tuple(getattr(self.input(node, name), "shape", ()))
        if len(shape) < 4:
            raise Unknown("computed", node)
        *counts, height, width, _channels = (int(side) for side in shape)
        return math.prod(counts), height, width

    def output(self, output: Output) -> Any:
        """What comes out of a node: a number, a text, or a picture without pixels. Raises `Unknown`."""
        node = output.node
        if node not in self._known:
            self._known[node] = self._made(node)
        found = self._known[node]
        if isinstance(found, Unknown):
            raise found
        if not 0 <= output.place < len(found) or found[output.place] is None:
            raise Unknown("computed", node)
        return found[output.place]

    def chosen(self, switch: str) -> str:
        """The input that a switch passes on. Raises `Unknown`."""
        inputs = self._prompt[switch]["inputs"]
        kind = self._prompt[switch]["class_type"]
        by, *ways = SWITCHES[kind]
        if kind == SOFT and sum(way in inputs for way in ways) == 1:
            return next(way for way in ways if way in inputs)
        value = self.input(switch, by)
        if not isinstance(value, (bool, int, float)):
            raise Unknown("noValue", switch, what=by)
        return ways[bool(value)]

    def _made(self, node: str) -> tuple[Any, ...] | Unknown:
        self._known[node] = circle = Unknown("computed", node)
        self._depth += 1
        try:
            return circle if self._depth > DEEP else self._worked_out(node)
        except Unknown as reason:
            return reason
        except OutOfTime:
            raise
        except Exception:  # stock's code, and torch, on numbers that they are not made for
            log.debug("not worked out", exc_info=True)
            return circle
        finally:
            self._depth -= 1

    def _worked_out(self, node: str) -> tuple[Any, ...]:
        kind, inputs = self._prompt[node]["class_type"], self._prompt[node]["inputs"]
        if kind in CONSTANTS:
            return (self.input(node, "value"),)
        if kind in SWITCHES:
            return (self.input(node, self.chosen(node)),)
        if kind in HANDS_ON:
            places = HANDS_ON[kind]
            return tuple(self.input(node, places[i]) if i in places else None for i in range(max(places) + 1))
        if kind in input_files.READ:
            return input_files.READ[kind](node, inputs)
        if kind == "GetVideoComponents":
            clip = self.input(node, "video")
            if not isinstance(clip, input_files.Clip):
                raise Unknown("computed", node)
            return input_files.picture(clip.frames, clip.height, clip.width), None, clip.rate, None
        if kind == "GetImageSize":
            batch, height, width = self.size(node, "image")
            return width, height, batch
        if kind == "ImagePadForOutpaint":  # which would go over all pixels
            left, top, right, bottom = (int(self.number(node, side)) for side in ("left", "top", "right", "bottom"))
            batch, height, width = self.size(node, "image")
            return input_files.picture(batch, height + top + bottom, width + left + right), None
        if kind == "FluxKontextImageScale":
            return (self._as_kontext(node),)
        if kind in DECODES and self._decoded is not None:
            return (input_files.picture(*self._decoded(node)),)
        if kind in SAME_SIZE:
            return (self.input(node, self._only_picture(node)),)
        if kind in RUN and self._kinds[node].is_plain:
            return self._run(node)
        raise Unknown("computed", node)

    def _only_picture(self, node: str) -> str:
        """The name of the only input that takes a picture."""
        links = {name: output_of(value) for name, value in self._prompt[node]["inputs"].items() if is_link(value)}
        found: list[str] = [name for name, output in links.items() if self._is_picture(output)]
        if len(found) != 1:
            raise Unknown("computed", node)
        return found[0]

    def _is_picture(self, output: Output) -> bool:
        outputs = self._kinds[output.node].outputs if output.node in self._kinds else ()
        return output.place < len(outputs) and outputs[output.place] == IMAGE

    def _as_kontext(self, node: str) -> Any:
        """The picture at the size of stock's table that is the nearest in shape."""
        code = self._kinds[node].code
        told = vars(sys.modules.get(getattr(code, "__module__", ""), object))
        sizes = next((told[name] for name in KONTEXT if name in told), None)
        batch, height, width = self.size(node, "image")
        if not sizes:
            raise Unknown("computed", node)
        _, wide, high = min((abs(width / height - w / h), w, h) for w, h in sizes)
        return input_files.picture(batch, high, wide)

    def _run(self, node: str) -> tuple[Any, ...]:
        import torch  # noqa: PLC0415 - the server starts without it

        given = {name: self.input(node, name) for name in self._prompt[node]["inputs"]}
        given |= {name: NEEDS_NONE for name, value in given.items() if isinstance(value, str) and value == NEEDS_PIXELS}
        if self._prompt[node]["class_type"] == FORMULA and not expressions.is_short(given.get("expression")):
            raise Unknown("computed", node)
        with torch.device("meta"):
            return _results(self._kinds[node].code, nested(given))


def nested(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs as a node's code takes them. `a.b` is the part b of a; where a itself has a value, it is its own part a."""
    whole = {name.partition(".")[0] for name in inputs if "." in name}
    found: dict[str, Any] = {name: {} for name in whole}
    for name, value in inputs.items():
        owner, _, part = name.partition(".")
        if owner in whole:
            found[owner][part or owner] = value
        else:
            found[name] = value
    return found


def _results(code: Any, inputs: dict[str, Any]) -> tuple[Any, ...]:
    """What a class of stock's makes of these inputs, in either of ComfyUI's ways to write one."""
    if hasattr(code, "define_schema"):
        return tuple(code.execute(**inputs).args)
    return tuple(getattr(code(), code.FUNCTION)(**inputs))
