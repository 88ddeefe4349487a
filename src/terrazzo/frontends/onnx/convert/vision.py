"""Images read at computed places: grids, regions, columns, deformable windows."""

from __future__ import annotations

from typing import NoReturn

from terrazzo.frontends.onnx.convert.windows import explicit_pads, kernel_of, read_windows
from terrazzo.frontends.onnx.registry import Call, Result, converts
from terrazzo.ops import image_blocks, vision


@converts("GridSample")
def grid_sample(call: Call) -> Result:
    mode = call.attr("mode", "bilinear" if call.version < 20 else "linear")
    return vision.grid_sample(call.value(0), call.value(1), mode=mode,
                              padding_mode=call.attr("padding_mode", "zeros"),
                              align_corners=bool(call.attr("align_corners", 0)))


@converts("AffineGrid")
def affine_grid(call: Call) -> Result:
    return vision.affine_grid(call.value(0), size=tuple(call.ints(1)),
                              align_corners=bool(call.attr("align_corners", 0)))


@converts("RoiAlign")
def roi_align(call: Call) -> Result:
    place = call.attr("coordinate_transformation_mode",
                      "output_half_pixel" if call.version < 16 else "half_pixel")
    return vision.roi_align(
        call.value(0), call.value(1), call.value(2), output_height=call.attr("output_height", 1),
        output_width=call.attr("output_width", 1), sampling_ratio=call.attr("sampling_ratio", 0),
        spatial_scale=call.attr("spatial_scale", 1.0), mode=call.attr("mode", "avg"),
        half_pixel=place == "half_pixel")


@converts("MaxRoiPool")
def max_roi_pool(call: Call) -> Result:
    return vision.max_roi_pool(call.value(0), call.value(1),
                               pooled_shape=tuple(call.attr("pooled_shape")),
                               spatial_scale=call.attr("spatial_scale", 1.0))


@converts("Col2Im")
def col2im(call: Call) -> Result:
    image, block = tuple(call.ints(1)), tuple(call.ints(2))
    ones = (1,) * len(image)
    return image_blocks.col2im(
        call.value(0), image_shape=image, block_shape=block,
        strides=tuple(call.attr("strides") or ones), padding=explicit_pads(call, len(image)),
        dilation=tuple(call.attr("dilations") or ones))


@converts("DeformConv")
def deform_conv(call: Call) -> Result:
    x, weight = call.value(0), call.value(1)
    at = read_windows(call, x.shape[2:], kernel_of(call, weight))
    return vision.deform_conv(
        x, weight, call.value(2), call.optional(3), call.optional(4), strides=at.strides,
        padding=at.padding, dilation=at.dilation, groups=call.attr("group", 1),
        offset_groups=call.attr("offset_group", 1))


@converts("ImageDecoder")
def image_decoder(call: Call) -> NoReturn:
    call.unsupported("decodes image files, which is not compiled")
