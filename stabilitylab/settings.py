"""The settings that decide a run, section by section: types, bounds, defaults and the purpose of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

Stack = Literal["encoder-decoder", "encoder", "decoder"]
Base = Literal["xavier", "gpt2", "normal"]
Design = Literal["transformer", "gpt2", "llama"]
Parallel = Literal["none", "ddp", "fsdp"]
CudaGraphs = Literal["auto", "on", "off"]
Compile = Literal["auto", "on", "off"]
Attention = Literal["auto", "torch", "math"]
CONTEXT = 1024  # rows of a table of learned positions if nothing says how long inputs are; GPT-2's
MAX_LAYERS = 20_000  # beyond any published depth; a typo of 10^9 should not reach the allocator


@dataclass(frozen=True)
class Later:
    """A mark for a setting that is newer than some recorded runs: those runs behaved as with its value ``before``."""

    before: Any


RAMP = ("growth", "T", "t0")  # options of an architecture that are settings of the model too
NEUTRAL = "neutral"  # marks a setting that changes neither what a run measures nor whether it may be continued
LARGEST = 1e38  # a larger number may be infinite in float32
MOST = 10**9  # the largest number of updates, for example: a typo beyond is refused
SENTENCES = 10**6  # the largest number of sentences or micro-batches of a setting


class Section(BaseModel):
    """A frozen group of settings; an unknown key is refused by name."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields.get(info.field_name or "")
        if isinstance(value, bool) and field is not None and field.annotation is not bool:
            raise PydanticCustomError("truth", "Input should not be true or false")
        return value


class ModelConfig(Section):
    """The reference Transformer: sizes, architecture and the controls that separate its ingredients."""

    arch: str = "branchnorm"
    decoder_arch: str | None = None  # None: the same as arch (Admin, Table 1, mixes them)
    # a published model. Its settings (designs.py) are the defaults of the others here; this name itself sets nothing
    design: Annotated[Design, NEUTRAL, Later("transformer")] = "transformer"
    stack: Stack = "encoder-decoder"
    encoder_layers: int = Field(default=100, ge=0, le=MAX_LAYERS)
    decoder_layers: int = Field(default=100, ge=0, le=MAX_LAYERS)
    d_model: int = Field(default=64, ge=2, le=65_536)
    d_ffn: int = Field(default=128, ge=1, le=1_048_576)
    heads: int = Field(default=2, ge=1, le=65_536)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    activation_dropout: float = Field(default=0.0, ge=0, lt=1)
    tie: Literal["output", "all", "none"] = "output"  # output: target embedding = output matrix; all: source too
    # arch: that of the architecture; xavier: Xavier with gain 1/sqrt(2) for q, k, v, as in fairseq;
    # arch-1, xavier-1: the same with gain 1 for q, k, v too, as DeepNet defines Post-LN; deepnorm: DeepNorm's; -gpt2:
    # over N(0, .02^2), 1/sqrt(2 layers) smaller on out and fc2; -normal: over N(0, .02^2) for every matrix
    init: Literal[
        "arch", "xavier", "deepnorm", "arch-1", "xavier-1", "arch-gpt2", "base-gpt2", "arch-normal", "base-normal"
    ] = "arch"
    alpha: float | None = Field(
        default=None, ge=0, le=LARGEST
    )  # replaces the arch's residual (DeepNorm) or branch (BranchNorm) constant
    qk_gain: float | None = Field(default=None, ge=0, le=LARGEST)  # replaces the initial gain of q and k
    v_gain: Annotated[float | None, Later(None)] = Field(default=None, ge=0, le=LARGEST)  # replaces that of v
    norm: Literal["layernorm", "rmsnorm", "dyt", "derf"] = "layernorm"  # of every norm of the model
    # where alpha of DyT and Derf starts: at attention, at feed-forward blocks, outside the layers. LLaMA with DyT has
    # .8, .2, .2 at 7B and .6, .15, .15 at 13B
    norm_alpha: Annotated[tuple[float, float, float], Later([0.5, 0.5, 0.5])] = (0.5, 0.5, 0.5)
    qk_norm: bool = False  # normalise each head's queries and keys before their product
    # gated attention: each head's output, or each feature of it, times sigmoid of a linear of what gives the queries
    attention_gate: Annotated[Literal["off", "head", "element"], Later("off")] = "off"
    # value residual: the values of self-attention above layer 1 are w_1 V_1 + w_2 V_l; learned: each layer trains its w
    value_residual: Annotated[Literal["off", "fixed", "learned"], Later("off")] = "off"
    value_weights: Annotated[tuple[float, float], Later([0.5, 0.5])] = (0.5, 0.5)  # w_1, w_2; their start if learned
    # rope: pairs of features of queries and keys are rotated (Su et al. 2021); cross-attention has no positions then
    positions: Annotated[Literal["sinusoidal", "learned", "rope"], Later("sinusoidal")] = "sinusoidal"
    # rows of a table of learned positions; None: data.max_length, or CONTEXT where a model is built without data
    context: Annotated[int | None, Later(None)] = Field(default=None, ge=1, le=1_048_576)
    activation: Annotated[Literal["relu", "gelu", "swiglu"], Later("relu")] = "relu"  # of the feed-forward blocks
    bias: Annotated[bool, Later(True)] = True  # of linears, and of LayerNorms
    embedding_scale: Annotated[Literal["sqrt(d)", 1], Later("sqrt(d)")] = "sqrt(d)"  # factor on embeddings
    # ProRes, an option of some architectures: alpha = min(1, t / (T l)) on the branches of layer l; equal: t / T
    prores: Annotated[Literal["off", "linear", "equal"], Later("off")] = "off"
    prores_T: Annotated[int, Later(1000)] = Field(default=1000, ge=1, le=MOST)
    prores_t0: Annotated[int, Later(0)] = Field(default=0, ge=0, le=MOST)  # t of row 0
    prores_order: Annotated[Literal["restart", "through"], Later("restart")] = "restart"  # of l in an encoder-decoder
    # Aliases of arch.growth, arch.T and arch.t0, the options of BranchNorm's ramp: recorded here, as in runs from
    # before architectures had options of their own.
    growth: Literal["linear", "exp", "sigmoid"] = "linear"
    T: int = Field(default=4000, ge=1, le=MOST)
    t0: int = Field(default=1, ge=0, le=MOST)
    options: Annotated[dict[str, Any], Later({})] = Field(default_factory=dict)  # all other options, as arch.KEY

    @field_validator("prores", mode="before")
    @classmethod
    def _prores_is_defined(cls, value: Any) -> Any:
        if value in ("reverse", "sqrt", "square", "stagewise", "fixed"):
            raise ValueError(
                f"model.prores = {value!r} is a schedule of ProRes's code that is not implemented here: use linear or "
                "equal"
            )
        return value

    @field_validator("value_residual", mode="before")
    @classmethod
    def _value_residual_is_defined(cls, value: Any) -> Any:
        if value == "sparse":
            raise ValueError(
                "model.value_residual = 'sparse', which mixes the values of some top layers only (2410.17897), is not "
                "implemented here: use fixed or learned"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _kind_is_stack(cls, given: Any) -> Any:
        """Read ``kind``, another name of ``stack``. Runs record it as ``stack``."""
        if not isinstance(given, dict) or "kind" not in given:
            return given
        rest = {key: value for key, value in given.items() if key != "kind"}
        if rest.get("stack", given["kind"]) != given["kind"]:
            raise ValueError(
                f"model.kind = {given['kind']!r} and model.stack = {rest['stack']!r} are one setting: give one of them"
            )
        return {**rest, "stack": given["kind"]}

    @model_validator(mode="after")
    def _sizes_fit(self) -> ModelConfig:
        if self.d_model % self.heads:
            raise ValueError(f"model.d_model = {self.d_model} must be a multiple of model.heads = {self.heads}")
        if self.d_model % 2 and self.positions == "sinusoidal":
            raise ValueError(f"model.d_model = {self.d_model} must be even (sinusoidal positions)")
        if self.d_model // self.heads % 2 and self.positions == "rope":
            raise ValueError(
                f"model.d_model / model.heads = {self.d_model // self.heads} must be even (model.positions = 'rope')"
            )
        need = {"encoder-decoder": ("encoder_layers", "decoder_layers")}.get(self.stack, (f"{self.stack}_layers",))
        for key in ("encoder_layers", "decoder_layers"):
            layers = getattr(self, key)
            if key in need and layers < 1:
                raise ValueError(f"model.{key} must be at least 1 with model.stack = {self.stack!r}")
            if key not in need and layers:
                raise ValueError(f"model.{key} must be 0 with model.stack = {self.stack!r}")
        if self.norm in ("dyt", "derf") and self.qk_norm:
            raise ValueError(f"model.qk_norm needs a norm: give model.norm = layernorm or rmsnorm, not {self.norm}")
        if self.decoder_arch is not None and self.stack != "encoder-decoder":
            raise ValueError("model.decoder_arch needs an encoder and a decoder: use model.arch alone")
        if self.tie == "all" and self.stack != "encoder-decoder":
            raise ValueError("model.tie = 'all' needs an encoder and a decoder: use 'output'")
        return self

    @model_serializer(mode="wrap")
    def _without_empty_options(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out empty options: such files equal those of versions without options."""
        return {key: value for key, value in dump(self).items() if key != "options" or value}

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # options are a dict

    @property
    def qkv_gain(self) -> float:
        """Return the initial gain of q, k and v in the base of all architectures: 1, or that of fairseq, whose q, k and
        v are one fused (3d, d) matrix."""
        return 1.0 if self.init in ("arch-1", "xavier-1") else math.sqrt(0.5)

    @property
    def base(self) -> Base:
        """Return the base of all architectures' initial gains that ``init`` names."""
        return "gpt2" if self.init.endswith("-gpt2") else "normal" if self.init.endswith("-normal") else "xavier"

    @property
    def depth(self) -> int:
        """Return the number of layers of all stacks together: 200 is 100L-100L."""
        return self.encoder_layers + self.decoder_layers


class DataConfig(Section):
    """The source of the text, and its division into batches."""

    source: str = "synthetic"  # a form of `stabilitylab list sources`, such as text:SRC,TGT
    valid: str | None = None  # SRC,TGT held-out files (text) or a split name (hf); None: cut from the training text
    vocab_size: int = Field(default=2000, ge=64, le=1_000_000)  # joint BPE size
    sentences: int = Field(default=16, ge=1, le=SENTENCES)  # rows of a batch in the longest shape bucket
    # shapes: the most shapes that batches have; length_multiple: the number that lengths of batches are multiples of.
    # With more shapes there is less padding: a batch has more real tokens, and as many tokens with padding as before
    shapes: Annotated[int, Later(2)] = Field(default=2, ge=1, le=64)
    length_multiple: Annotated[int, Later(1)] = Field(default=1, ge=1, le=64)
    max_length: int = Field(
        default=24, ge=4, le=4096
    )  # tokens a side, end of sentence included; longer pairs are left out
    fraction: float = Field(default=1.0, gt=0, le=1)  # share of the training pairs that is used
    held_out: int = Field(default=24, ge=1, le=SENTENCES)  # sentences of the fixed reference batch
    # sentences of the evaluation after training: with a validation text all of it, else so many (but at most a tenth
    # of the pairs); 0: the reference batch alone
    validation: Annotated[int, Later(0)] = Field(default=400, ge=0, le=SENTENCES)
    # the largest text file, unpacked, since memory holds it; and the longest line, since a longer one is no sentence
    max_file_mb: Annotated[int, NEUTRAL] = Field(default=1000, ge=1, le=MOST)
    max_line_kb: Annotated[int, NEUTRAL] = Field(default=1000, ge=1, le=MOST)
    seed: int = Field(default=0, ge=0, lt=2**63)  # order of batches and masks; the same for all archs


class TrainConfig(Section):
    """The papers' recipe where they state one: Adam (.9, .98), eps 1e-8, weight decay 1e-4, inverse square root."""

    steps: int = Field(default=240, ge=1, le=MOST)
    lr: float = Field(default=3e-4, gt=0, le=LARGEST)
    warmup: int = Field(default=120, ge=0, le=MOST)  # updates; 0: none
    warmup_init_lr: float = Field(default=1e-7, ge=0, le=LARGEST)
    schedule: Literal["inverse_sqrt", "constant", "linear"] = "inverse_sqrt"  # linear: to 0 at the end (Admin's grid)
    # updates that the schedule spans, where the run is stopped earlier and may be continued; None: ``steps``
    horizon: Annotated[int | None, Later(None)] = Field(default=None, ge=1, le=MOST)
    optimizer: Literal["adamw", "radam"] = "adamw"  # radam: Admin's published recipe
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.98, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0, le=LARGEST)
    weight_decay: float = Field(default=1e-4, ge=0, le=LARGEST)  # decoupled
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    clip_norm: float = Field(default=0.0, ge=0, le=LARGEST)  # 0: no clipping
    accumulate: int = Field(default=1, ge=1, le=SENTENCES)  # micro-batches an update
    precision: Literal["fp32", "bf16"] = "fp32"
    working_weights: Annotated[bool, NEUTRAL] = False  # bf16: copies of the matrices, refreshed once an update
    one_pass: Annotated[bool, Later(False)] = False  # AdamW's step also computes the sums for probes, in one kernel
    activation_checkpointing: bool = False  # keep only each layer's input; the backward pass computes the rest again
    device: Annotated[str, NEUTRAL] = "auto"  # auto | cpu | cuda | cuda:N
    # kernels of attention; auto: on a GPU all but cuDNN's, which has given NaN gradients; torch: the choice of torch
    attention: Annotated[Attention, NEUTRAL] = "auto"
    cuda_graphs: CudaGraphs = "auto"  # replay whole updates on a GPU; auto: wherever they can be recorded
    # compile the layers with their probes; auto: off on CUDA until measured there. Rounding and dropout then differ
    compile: Annotated[Compile, Later("auto")] = "auto"
    parallel: Parallel = "none"  # how the processes of torchrun share the model: replicas (ddp) or shards (fsdp)
    threads: Annotated[int, NEUTRAL] = Field(default=1, ge=1, le=1024)
    seed: int = Field(default=0, ge=0, lt=2**63)  # initial weights and dropout
    # minutes and updates between checkpoints; 0: no checkpoints by time, or none by the number of updates
    checkpoint_minutes: Annotated[float, NEUTRAL] = Field(default=10.0, ge=0, le=MOST)
    checkpoint_every: Annotated[int, NEUTRAL] = Field(default=0, ge=0, le=MOST)
    final_checkpoint: Annotated[bool, NEUTRAL] = (
        True  # False: a run that has ended keeps no weights, and can be neither evaluated nor continued
    )
    on_divergence: Literal["continue", "stop"] = "continue"
    # the number of evaluations on the held-out batch, evenly over the run, in addition to those for probes
    evaluations: Annotated[int, Later(0)] = Field(default=50, ge=0, le=MOST)

    @property
    def span(self) -> int:
        """Return the number of updates that the schedule spans: ``horizon``, or ``steps`` if no horizon is given."""
        return self.steps if self.horizon is None else self.horizon

    @model_validator(mode="after")
    def _horizon_fits(self) -> TrainConfig:
        if self.steps > self.span:
            raise ValueError(f"train.steps = {self.steps} must not exceed train.horizon = {self.horizon}")
        return self

    @model_validator(mode="after")
    def _one_pass_fits(self) -> TrainConfig:
        if self.one_pass and (self.optimizer != "adamw" or self.clip_norm or self.parallel != "none"):
            needs = "train.optimizer = 'adamw', train.clip_norm = 0 and train.parallel = 'none'"
            raise ValueError(f"train.one_pass needs {needs}: gradients are measured as the step finds them")
        return self

    @model_validator(mode="after")
    def _working_weights_fit(self) -> TrainConfig:
        if self.working_weights and (self.precision != "bf16" or self.parallel != "none"):
            raise ValueError("train.working_weights needs train.precision = 'bf16' and train.parallel = 'none'")
        return self


class ProbesConfig(Section):
    """The probes of a run, and the steps at which they run."""

    names: tuple[str, ...] = ("default",)
    every: int | Literal["log"] = "log"  # log: 0..11, then 10 % apart
    update_every: int | Literal["log"] = "log"  # of the reference pass (||dF||, similarity, ...); log: 20 % apart
    # the batch whose loss the probes of curvature measure: the held-out batch, the first training batch, or in each row
    # the batch from which the update of this row is made
    curvature_batch: Annotated[Literal["held-out", "training", "update"], Later("held-out")] = "held-out"
    # the rows of the probes of curvature; auto: every 200 updates, from 20,000 on 1 % apart; log: 20 % apart
    curvature_every: Annotated[int | Literal["auto", "log"], Later("auto")] = "auto"
    # record: keep snapshots and batches, so that `explain` can replay the run; record_every: updates between snapshots
    record: Annotated[bool, NEUTRAL, Later(False)] = False
    record_every: Annotated[int, NEUTRAL, Later(100)] = Field(default=100, ge=1, le=MOST)

    @model_validator(mode="after")
    def _positive(self) -> ProbesConfig:
        for key in ("every", "update_every", "curvature_every"):
            if isinstance(value := getattr(self, key), int) and not 1 <= value <= MOST:
                raise ValueError(f"probes.{key} must be at least 1, or 'log'")
        return self


class Config(Section):
    """Everything that decides a run."""

    preset: Annotated[str, NEUTRAL] = "tiny"
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    probes: ProbesConfig = ProbesConfig()

    def changed(self, **sections: Mapping[str, Any]) -> Config:
        """Return the configuration with other settings, such as ``train={"seed": 3}``, which are not validated."""
        own = {name: getattr(self, name).model_copy(update=settings) for name, settings in sections.items()}
        return self.model_copy(update=own)
