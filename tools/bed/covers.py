"""What families cover, in the languages of the help pages: by the English words, so that words that change have none any more."""

from __future__ import annotations

HEADS = {"zh": ("系列", "由 FuseStream 计算"), "ja": ("系列", "FuseStream が計算するもの")}

COVERS: dict[str, dict[str, str]] = {
    "CLIP-L, CLIP-G and OpenCLIP H (Stable Diffusion, SDXL): FP16 products around an FP32 stream": {
        "zh": "CLIP-L、CLIP-G 和 OpenCLIP H（Stable Diffusion、SDXL）：FP16 乘法，围绕 FP32 数据流",
        "ja": "CLIP-L、CLIP-G、OpenCLIP H（Stable Diffusion、SDXL）：FP32 の流れの周りに FP16 の積",
    },
    "Flux.2 (klein 4B and 9B, dev), Flux.1 (dev, schnell, Kontext, Fill and their like), LongCat-Image and Chroma "
    "(Ovis-Image and Chroma Radiance stream as all others do)": {
        "zh": "Flux.2（klein 4B 和 9B、dev）、Flux.1（dev、schnell、Kontext、Fill 及其同类）、LongCat-Image 和 Chroma"
        "（Ovis-Image 和 Chroma Radiance 与其他模型一样流式读取）",
        "ja": "Flux.2（klein 4B と 9B、dev）、Flux.1（dev、schnell、Kontext、Fill とその仲間）、LongCat-Image、Chroma"
        "（Ovis-Image と Chroma Radiance は、ほかのモデルと同じようにストリーミング）",
    },
    "Qwen-Image (2512 too), Qwen-Image Edit (2509 and 2511 too) and Qwen-Image Layered: FP16 products around an FP32 stream": {
        "zh": "Qwen-Image（包括 2512）、Qwen-Image Edit（包括 2509 和 2511）和 Qwen-Image Layered：FP16 乘法，围绕 FP32 数据流",
        "ja": "Qwen-Image（2512 も）、Qwen-Image Edit（2509 と 2511 も）、Qwen-Image Layered：FP32 の流れの周りに FP16 の積",
    },
    "Stable Diffusion's, SDXL's, Flux' and Flux.2's: encoding and decoding within 3 GiB up to 4096x4096, in bands without "
    "seams, in fp16": {
        "zh": "Stable Diffusion、SDXL、Flux 和 Flux.2 的：在 3 GiB 之内编码和解码，最大 4096x4096，分带而无接缝，fp16",
        "ja": "Stable Diffusion、SDXL、Flux、Flux.2 のもの：4096x4096 まで 3 GiB 以内でエンコードとデコード、"
        "継ぎ目のない帯で、fp16",
    },
    "TAESD's for Stable Diffusion, SDXL, SD 3, Flux and Flux.2: encoding and decoding within 3 GiB up to 4096x4096, in "
    "bands without seams, in fp16": {
        "zh": "用于 Stable Diffusion、SDXL、SD 3、Flux 和 Flux.2 的 TAESD：在 3 GiB 之内编码和解码，最大 4096x4096，"
        "分带而无接缝，fp16",
        "ja": "Stable Diffusion、SDXL、SD 3、Flux、Flux.2 用の TAESD：4096x4096 まで 3 GiB 以内でエンコードとデコード、"
        "継ぎ目のない帯で、fp16",
    },
    "MiniMax H3, pruned too, where a card has no BF16, around an FP32 stream (with BF16 it streams as all others do)": {
        "zh": "MiniMax H3，包括裁剪版，在没有 BF16 的显卡上，围绕 FP32 数据流（有 BF16 时与其他模型一样流式读取）",
        "ja": "BF16 のないカードでの MiniMax H3、枝刈り版も、FP32 の流れの周りに（BF16 があるときは、"
        "ほかのモデルと同じようにストリーミング）",
    },
    "Qwen3 0.6B to 8B (Flux.2 klein, Z-Image, Anima): FP16 products around an FP32 stream, no layers that nothing reads; "
    "writes": {
        "zh": "Qwen3 0.6B 到 8B（Flux.2 klein、Z-Image、Anima）：FP16 乘法，围绕 FP32 数据流，不计算没有人读取的层；能写作",
        "ja": "Qwen3 0.6B から 8B（Flux.2 klein、Z-Image、Anima）：FP32 の流れの周りに FP16 の積、何も読まない層は計算しない。"
        "文章も書く",
    },
    "Qwen2.5 3B and Qwen2.5-VL 7B (OmniGen 2, Qwen-Image, HunyuanVideo 1.5), its vision tower too: FP16 products around an "
    "FP32 stream, FP32 attention in the language model": {
        "zh": "Qwen2.5 3B 和 Qwen2.5-VL 7B（OmniGen 2、Qwen-Image、HunyuanVideo 1.5），包括视觉部分：FP16 乘法，围绕 FP32 数据流，"
        "语言模型中用 FP32 注意力",
        "ja": "Qwen2.5 3B と Qwen2.5-VL 7B（OmniGen 2、Qwen-Image、HunyuanVideo 1.5）、視覚部分も：FP32 の流れの周りに FP16 の積、"
        "言語モデルでは FP32 のアテンション",
    },
    "Gemma 3 4B and 12B (LTX-2, NewBie), its vision tower too: FP16 products around an FP32 stream, without LTX-2's padding; "
    "writes": {
        "zh": "Gemma 3 4B 和 12B（LTX-2、NewBie），包括视觉部分：FP16 乘法，围绕 FP32 数据流，不含 LTX-2 的填充；能写作",
        "ja": "Gemma 3 4B と 12B（LTX-2、NewBie）、視覚部分も：FP32 の流れの周りに FP16 の積、LTX-2 の詰め物なし。文章も書く",
    },
    "Gemma 2 2B (Lumina Image 2, PixelDiT): FP16 products around an FP32 stream, FP32 attention; writes": {
        "zh": "Gemma 2 2B（Lumina Image 2、PixelDiT）：FP16 乘法，围绕 FP32 数据流，FP32 注意力；能写作",
        "ja": "Gemma 2 2B（Lumina Image 2、PixelDiT）：FP32 の流れの周りに FP16 の積、FP32 のアテンション。文章も書く",
    },
    "Llama 3.1 8B (HiDream, HunyuanVideo), Mistral Small 3 24B (Flux.2 dev), Ministral 3 3B (ERNIE-Image): FP16 products "
    "around an FP32 stream, FP32 attention; Ministral writes": {
        "zh": "Llama 3.1 8B（HiDream、HunyuanVideo）、Mistral Small 3 24B（Flux.2 dev）、Ministral 3 3B（ERNIE-Image）："
        "FP16 乘法，围绕 FP32 数据流，FP32 注意力；Ministral 能写作",
        "ja": "Llama 3.1 8B（HiDream、HunyuanVideo）、Mistral Small 3 24B（Flux.2 dev）、Ministral 3 3B（ERNIE-Image）："
        "FP32 の流れの周りに FP16 の積、FP32 のアテンション。Ministral は文章も書く",
    },
    "Qwen3-VL 2B to 32B (Krea 2, MiniMax H3): its vision tower and its language model, FP16 products around FP32 streams; "
    "writes": {
        "zh": "Qwen3-VL 2B 到 32B（Krea 2、MiniMax H3）：它的视觉部分和语言模型，FP16 乘法，围绕 FP32 数据流；能写作",
        "ja": "Qwen3-VL 2B から 32B（Krea 2、MiniMax H3）：その視覚部分と言語モデル、FP32 の流れの周りに FP16 の積。文章も書く",
    },
    "UMT5-XXL (Wan) and T5-XXL: FP16 products around an FP32 stream, without the padding": {
        "zh": "UMT5-XXL（Wan）和 T5-XXL：FP16 乘法，围绕 FP32 数据流，不含填充",
        "ja": "UMT5-XXL（Wan）と T5-XXL：FP32 の流れの周りに FP16 の積、詰め物なし",
    },
    "Stable Diffusion 1.5, 2.1 and SDXL, their inpainting, Turbo, LCM, Lightning and Hyper versions: the whole U-Net, its "
    "pictures channels-last from the first convolution to the last": {
        "zh": "Stable Diffusion 1.5、2.1 和 SDXL，以及它们的重绘、Turbo、LCM、Lightning 和 Hyper 版本：整个 U-Net，"
        "从第一个卷积到最后一个，图像都是通道在后",
        "ja": "Stable Diffusion 1.5、2.1、SDXL と、それらのインペイント、Turbo、LCM、Lightning、Hyper 版：U-Net 全体、"
        "最初の畳み込みから最後まで画像はチャンネルが末尾",
    },
    "Wan 2.1 and 2.2, 1.3B to 14B: T2V, I2V, FLF2V, VACE, Fun, camera, 5B, S2V, Animate (HuMo and causal Wan stream as all "
    "others do); TurboWan (SLA) and FastWan (VSA) with the sparse attention that they were trained with": {
        "zh": "Wan 2.1 和 2.2，1.3B 到 14B：T2V、I2V、FLF2V、VACE、Fun、摄像机、5B、S2V、Animate"
        "（HuMo 和因果 Wan 与其他模型一样流式读取）；TurboWan（SLA）和 FastWan（VSA）使用它们训练时的稀疏注意力",
        "ja": "Wan 2.1 と 2.2、1.3B から 14B：T2V、I2V、FLF2V、VACE、Fun、カメラ、5B、S2V、Animate"
        "（HuMo と因果的な Wan は、ほかのモデルと同じようにストリーミング）、"
        "TurboWan（SLA）と FastWan（VSA）は学習したスパースアテンションで",
    },
    "Wan 2.1's and 2.2's: encoding and decoding in bands of about 3 GiB, whatever the size": {
        "zh": "Wan 2.1 和 2.2 的：以约 3 GiB 的带编码和解码，任何尺寸都可以",
        "ja": "Wan 2.1 と 2.2 のもの：どんな大きさでも、約 3 GiB の帯でエンコードとデコード",
    },
    "Z-Image (Turbo, Base, Edit) and Lumina Image 2": {
        "zh": "Z-Image（Turbo、Base、Edit）和 Lumina Image 2",
        "ja": "Z-Image（Turbo、Base、Edit）と Lumina Image 2",
    },
    "LTX-2 and LTX-2.3 where a card has no BF16, around an FP32 stream (with BF16, and LTX-Video 0.9, they stream as all "
    "others do)": {
        "zh": "LTX-2 和 LTX-2.3，在没有 BF16 的显卡上，围绕 FP32 数据流（有 BF16 时，以及 LTX-Video 0.9，与其他模型一样流式读取）",
        "ja": "BF16 のないカードでの LTX-2 と LTX-2.3、FP32 の流れの周りに（BF16 があるとき、また LTX-Video 0.9 は、"
        "ほかのモデルと同じようにストリーミング）",
    },
}
