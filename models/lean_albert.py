"""LeanALBERT: an ALBERT that keeps little for the backward pass, so that long sequences fit on a volunteer's GPU.

The architecture is RuLeanALBERT's: factorized embeddings, pre-norm blocks whose weights may be shared between layers,
rotary positions, gated feed-forward, sandwich norm. models/pretrained.py loads its checkpoints.

A layer keeps its two inputs, which are parts of the residual stream, and the output of the feed-forward's first matrix;
with sandwich norm, also the inputs of those two norms. The backward pass recomputes the rest (see `recompute`). With
gradient checkpointing, it also recomputes the feed-forward's first product.

Importing this file registers the model with transformers' Auto classes. save_pretrained also copies this file, so that
a saved folder opens anywhere with trust_remote_code=True.
"""

import math
from collections import OrderedDict
from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPooling, MaskedLMOutput, SequenceClassifierOutput
from transformers.models.albert.modeling_albert import AlbertForPreTrainingOutput

# ---------------------------------------------------------------- configuration

TANH_GELU = ("gelu_fused", "gelu_new", "gelu_fast")  # other names of gelu_pytorch_tanh, which is the fastest of them


class LeanAlbertConfig(PreTrainedConfig):
    """The shape of a LeanALBERT; names and meanings are those of RuLeanALBERT's config.json.

    - embedding_size: width of the embeddings, which a projection widens to hidden_size
    - num_hidden_layers: number of times that a group runs. Each of the num_hidden_groups groups has its own weights for
      num_inner_groups layers; runs of the same group are consecutive. None: as many groups as layers
    - position_embedding_type: "rotary" (arxiv.org/abs/2104.09864), with rotary_embedding_base, takes any length;
      "absolute" takes max_position_embeddings tokens
    - hidden_act, hidden_act_gated: the activation, and whether it gates a second projection (arxiv.org/abs/2002.05202)
    - sandwich_norm: whether norms also follow attention and feed-forward (arxiv.org/abs/2105.13290)
    - attn_qkv_bias, out_proj_bias: whether these projections have a bias. None: output projections have one unless
      there is a sandwich norm, which has its own
    - share_large_matrices: number of parts of consecutive layers that share the four large matrices (True: 1; 0: each
      layer has its own); num_inner_matrices: sets of matrices in such a part, which its layers use in turn
    - adapter_dim: rank of each layer's addition to the shared matrices (arxiv.org/abs/2106.09685)
    - initializer_range: standard deviation of initial weights. None: SmallInit, sqrt(2 / (5 hidden_size))
      (arxiv.org/abs/1910.05895, section 2.2)
    - classifier_dropout_prob: dropout before a classifier in fine-tuning; there is no other dropout

    :raises ValueError: sizes do not fit together, or a feature is not implemented
    """

    model_type = "lean_albert"

    vocab_size: int = 30000
    embedding_size: int = 128
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_hidden_groups: int | None = None
    num_inner_groups: int = 1
    num_attention_heads: int = 64
    intermediate_size: int = 16384
    hidden_act: str = "gelu_fused"
    hidden_act_gated: bool = False
    sandwich_norm: bool = False
    attn_qkv_bias: bool = True
    out_proj_bias: bool | None = None
    share_large_matrices: int | bool = 0
    num_inner_matrices: int = 1
    adapter_dim: int = 0
    position_embedding_type: str = "rotary"
    rotary_embedding_base: int | float = 10_000
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    initializer_range: float | None = None
    classifier_dropout_prob: int | float = 0.1
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 3
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs):
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if kwargs.pop(name, 0):
                raise ValueError(f"LeanALBERT has no {name}: set it to 0 (classifier_dropout_prob is for fine-tuning)")
        for name in ("block_size", "lowrank_dim", "weight_layout", "reversible"):
            if kwargs.pop(name, None):
                raise ValueError(f"{name} is not supported: LeanALBERT has dense matrices and no reversible layers")
        if self.num_hidden_groups is None:
            self.num_hidden_groups = self.num_hidden_layers
        if self.out_proj_bias is None:
            self.out_proj_bias = not self.sandwich_norm
        if self.initializer_range is None:
            self.initializer_range = math.sqrt(2 / (5 * self.hidden_size))
        # for all Auto classes, not only for the saved model's
        kwargs["auto_map"] = {name: f"lean_albert.{model.__name__}" for name, model in AUTO_CLASSES.items()}
        super().__post_init__(**kwargs)
        layers = self.num_hidden_layers
        groups = self.num_hidden_groups
        heads = self.num_attention_heads
        sets = self.num_inner_matrices
        shares = int(self.share_large_matrices)
        own_layers = groups * self.num_inner_groups
        if self.position_embedding_type not in ("rotary", "absolute"):
            raise ValueError(f"position_embedding_type {self.position_embedding_type}: choose rotary or absolute")
        if self.hidden_act not in TANH_GELU and self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act {self.hidden_act} is unknown: choose gelu_new, gelu, relu, silu, ...")
        if self.hidden_size % heads:
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of num_attention_heads {heads}")
        if self.position_embedding_type == "rotary" and self.hidden_size // heads % 2:
            raise ValueError("rotary positions need heads of even size: change num_attention_heads")
        if min(self.num_inner_groups, sets) < 1:
            raise ValueError("num_inner_groups and num_inner_matrices must be at least 1")
        if not 1 <= groups <= layers:
            raise ValueError(f"num_hidden_groups {groups} must be between 1 and num_hidden_layers {layers}")
        if shares <= 0 and (self.adapter_dim or sets > 1):
            raise ValueError("adapter_dim and num_inner_matrices need share_large_matrices")
        if not 0 <= shares * sets <= own_layers:
            raise ValueError(
                f"share_large_matrices {shares} x num_inner_matrices {sets} must be between 0 and {own_layers}, the "
                "number of layers with their own weights"
            )

    def find_matrices(self, layer: int) -> int:
        """Return the index of the matrices that a layer (of num_hidden_groups x num_inner_groups) uses."""
        if not self.share_large_matrices:
            return layer
        part = layer * self.share_large_matrices // (self.num_hidden_groups * self.num_inner_groups)
        return part * self.num_inner_matrices + layer % self.num_inner_matrices

    def order_layers(self) -> list[int]:
        """Return the layers in the order in which they run: num_hidden_layers times all layers of one group."""
        order = []
        for step in range(self.num_hidden_layers):
            group = step * self.num_hidden_groups // self.num_hidden_layers
            order += range(group * self.num_inner_groups, (group + 1) * self.num_inner_groups)
        return order


def choose_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation of this name."""
    return ACT2FN["gelu_pytorch_tanh" if name in TANH_GELU else name]


# ---------------------------------------------------------------- one layer


def recompute(function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Return function(hidden), of which autograd keeps only the input.

    The backward pass calls the function again, but does not repeat a matrix product at its end: torch stops recomputing
    once it has the tensors that it needs, and the last one is the product's input.
    """
    return checkpoint(function, hidden, use_reentrant=False, preserve_rng_state=False)


Rotation = tuple[Tensor, Tensor] | None  # cosines and sines, see `rotate`


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions (arxiv.org/abs/2104.09864): rotate each pair (i, i + size / 2) of a head by its angle.

    :param states: [..., length, size]; cos and sin: [length, size / 2], fp32 or better
    """
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(states.dtype)


def attend(states: Tensor, num_heads: int, mask: Tensor | None, rotation: Rotation) -> Tensor:
    """Compute the attention of each token to all tokens.

    :param states: [batch, length, 3 x hidden]: queries, keys, values
    :param mask: [batch, 1, 1, length], added to the scores of each key
    :returns: [batch, length, hidden]
    """
    query, key, value = states.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    if rotation:
        query = rotate(query, *rotation)
        key = rotate(key, *rotation)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)


class SharedLinear(nn.Module):
    """A layer's own part of a linear map: bias and adapters. The matrix may belong to many layers."""

    def __init__(self, in_features: int, out_features: int, bias: bool, adapter_dim: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.adapter_first = nn.Parameter(torch.zeros(adapter_dim, in_features)) if adapter_dim else None
        self.adapter_second = nn.Parameter(torch.zeros(out_features, adapter_dim)) if adapter_dim else None

    def forward(self, hidden: Tensor, matrix: Tensor) -> Tensor:
        """Apply the linear map of a matrix [out, in] to [..., in], plus the adapters' (arxiv.org/abs/2106.09685)."""
        if self.adapter_first is None:
            return linear(hidden, matrix, self.bias)
        # the large product comes last, see `recompute`
        low_rank = linear(linear(hidden, self.adapter_first), self.adapter_second)
        return linear(hidden, matrix, self.bias) + low_rank


class LeanAlbertMatrices(nn.Module):
    """The four large matrices, each [out, in], of a layer or of all layers that share them."""

    def __init__(self, config: LeanAlbertConfig):
        super().__init__()
        hidden = config.hidden_size
        self.qkv = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.attention_output = nn.Parameter(torch.empty(hidden, hidden))
        self.ffn_input = nn.Parameter(torch.empty((1 + config.hidden_act_gated) * config.intermediate_size, hidden))
        self.ffn_output = nn.Parameter(torch.empty(hidden, config.intermediate_size))


class LeanAlbertLayer(nn.Module):
    """A layer of attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(self, config: LeanAlbertConfig):
        super().__init__()
        hidden = config.hidden_size
        rank = config.adapter_dim
        self.num_heads = config.num_attention_heads
        self.is_gated = config.hidden_act_gated
        eps = config.layer_norm_eps
        self.activation = choose_activation(config.hidden_act)
        self.attention_norm = nn.LayerNorm(hidden, eps)
        self.qkv = SharedLinear(hidden, 3 * hidden, config.attn_qkv_bias, rank)
        self.attention_output = SharedLinear(hidden, hidden, config.out_proj_bias, rank)
        self.ffn_norm = nn.LayerNorm(hidden, eps)
        self.ffn_input = SharedLinear(hidden, (1 + self.is_gated) * config.intermediate_size, True, rank)
        self.ffn_output = SharedLinear(config.intermediate_size, hidden, config.out_proj_bias, rank)
        self.attention_sandwich_norm = nn.LayerNorm(hidden, eps) if config.sandwich_norm else nn.Identity()
        self.ffn_sandwich_norm = nn.LayerNorm(hidden, eps) if config.sandwich_norm else nn.Identity()

    def forward(
        self, hidden: Tensor, matrices: LeanAlbertMatrices, mask: Tensor | None, rotation: Rotation, keep_wide: bool
    ) -> Tensor:
        """Return the new hidden states, [batch, length, hidden] like `hidden`; mask and rotation: see `attend`.

        :param keep_wide: whether to keep the output of the feed-forward's first product, or recompute it in backward
        """

        def mix(hidden: Tensor) -> Tensor:
            states = self.qkv(self.attention_norm(hidden), matrices.qkv)
            return self.attention_output(attend(states, self.num_heads, mask, rotation), matrices.attention_output)

        def widen(hidden: Tensor) -> Tensor:
            return self.ffn_input(self.ffn_norm(hidden), matrices.ffn_input)

        def narrow(wide: Tensor) -> Tensor:
            if self.is_gated:  # one half gates the other
                gate, values = wide.chunk(2, dim=-1)
                return self.ffn_output(self.activation(gate) * values, matrices.ffn_output)
            return self.ffn_output(self.activation(wide), matrices.ffn_output)

        hidden = hidden + self.attention_sandwich_norm(recompute(mix, hidden))
        if keep_wide:
            output = recompute(narrow, recompute(widen, hidden))
        else:
            output = recompute(lambda hidden: narrow(widen(hidden)), hidden)
        return hidden + self.ffn_sandwich_norm(output)


# ---------------------------------------------------------------- the models


class LeanAlbertEmbeddings(nn.Module):
    """The sum of a token's embeddings, normalized, and widened to the hidden size."""

    def __init__(self, config: LeanAlbertConfig):
        super().__init__()
        size = config.embedding_size
        self.word_embeddings = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size)
        is_absolute = config.position_embedding_type == "absolute"
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, size) if is_absolute else None
        self.layer_norm = nn.LayerNorm(size, config.layer_norm_eps)
        self.embedding_hidden_mapping = nn.Linear(size, config.hidden_size)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """Return the normalized sum of word, type and position embeddings, [batch, length, embedding size]."""
        types = self.token_type_embeddings
        types = types.weight[0] if token_type_ids is None else types(token_type_ids)
        embeddings = self.word_embeddings(input_ids) + types
        if self.position_embeddings is not None:
            length = input_ids.shape[1]
            longest = self.position_embeddings.num_embeddings
            if length > longest:
                raise ValueError(
                    f"a sequence of {length} tokens is longer than max_position_embeddings {longest}: truncate it, or "
                    "train with position_embedding_type rotary, which takes any length"
                )
            embeddings = embeddings + self.position_embeddings.weight[:length]
        embeddings = self.layer_norm(embeddings)
        # fp32 even under autocast, because all layers add to it
        return self.embedding_hidden_mapping(embeddings).to(embeddings.dtype)


class LeanAlbertPreTrainedModel(PreTrainedModel):
    """The base class of all LeanALBERT models, with their initialization and transformers' class attributes."""

    config_class = LeanAlbertConfig
    base_model_prefix = "albert"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _input_embed_layer = "word_embeddings"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LeanAlbertMatrices):
            for matrix in module.parameters():
                init.normal_(matrix, std=self.config.initializer_range)
        elif isinstance(module, SharedLinear):
            if module.bias is not None:
                init.zeros_(module.bias)
            if module.adapter_first is not None:
                init.xavier_normal_(module.adapter_first)
                init.zeros_(module.adapter_second)


class LeanAlbertModel(LeanAlbertPreTrainedModel):
    """The encoder without a head."""

    def __init__(self, config: LeanAlbertConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        own_layers = config.num_hidden_groups * config.num_inner_groups
        used = [config.find_matrices(layer) for layer in range(own_layers)]
        self.gradient_checkpointing = False
        self.embeddings = LeanAlbertEmbeddings(config)
        self.matrices = nn.ModuleList(LeanAlbertMatrices(config) for _ in range(max(used) + 1))
        self.layers = nn.ModuleList(LeanAlbertLayer(config) for _ in range(own_layers))
        self.post_layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size) if add_pooling_layer else None
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> BaseModelOutputWithPooling:
        """
        :param input_ids: [batch, length] int64, as is token_type_ids (default: 0)
        :param attention_mask: [batch, length], 0 at padding. None: no padding, which allows faster attention. The
            output of a row that is all padding is meaningless, but finite
        :returns: last_hidden_state [batch, length, hidden], and pooler_output [batch, hidden] of the first token
        :raises ValueError: a sequence is longer than the table of absolute positions
        """
        hidden = self.embeddings(input_ids, token_type_ids)
        mask = None
        if attention_mask is not None:
            device = hidden.device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
            # not -inf, because the softmax of a row of -inf is NaN
            mask = (attention_mask == 0).to(dtype)[:, None, None, :] * torch.finfo(dtype).min
        rotation = self.make_rotation(hidden) if self.config.position_embedding_type == "rotary" else None
        for layer in self.config.order_layers():
            matrices = self.matrices[self.config.find_matrices(layer)]
            hidden = self.layers[layer](hidden, matrices, mask, rotation, keep_wide=not self.gradient_checkpointing)
        hidden = self.post_layer_norm(hidden)
        pooled = torch.tanh(self.pooler(hidden[:, 0])) if self.pooler is not None else None
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)

    def make_rotation(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines [length, head size / 2] of the angles of `rotate`, in fp32 or better."""
        size = self.config.hidden_size // self.config.num_attention_heads
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # fp64, because the angles of late positions are large, and their fraction matters
        steps = torch.arange(0, size, 2, dtype=torch.float64, device=hidden.device) / size
        positions = torch.arange(hidden.shape[1], dtype=torch.float64, device=hidden.device)
        angles = positions[:, None] * self.config.rotary_embedding_base**-steps
        return angles.cos().to(dtype), angles.sin().to(dtype)


class LeanAlbertMLMHead(nn.Module):
    """The head from hidden states to vocabulary logits, through the transposed word embeddings."""

    def __init__(self, config: LeanAlbertConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)
        self.activation = choose_activation(config.hidden_act)
        self.layer_norm = nn.LayerNorm(config.embedding_size)  # with torch's own epsilon, as in RuLeanALBERT
        self.decoder = nn.Linear(config.embedding_size, config.vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits, [..., vocabulary], of hidden states, [..., hidden size]."""
        return self.decoder(self.layer_norm(self.activation(self.dense(hidden))))


def to_float32(logits: Tensor) -> Tensor:
    """Convert logits to at least fp32, because half precision is too coarse for a softmax over a vocabulary."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def find_labelled_positions(labels: Tensor) -> Tensor:
    """Return the int64 indices of labels other than -100 in the flattened [batch, length] labels."""
    return (labels.flatten() != -100).nonzero().squeeze(1)


class LeanAlbertWithMLMHead(LeanAlbertPreTrainedModel):
    """The base class of models with `predictions`, whose decoder is the transposed word embeddings."""

    _tied_weights_keys = {"predictions.decoder.weight": "albert.embeddings.word_embeddings.weight"}

    def __init__(self, config: LeanAlbertConfig, add_pooling_layer: bool):
        super().__init__(config)
        self.albert = LeanAlbertModel(config, add_pooling_layer)
        self.predictions = LeanAlbertMLMHead(config)

    def predict(self, hidden: Tensor, labels: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Return the mean loss over the labels, and the logits; in training, only those of labelled positions."""
        if labels is None:
            return None, self.predictions(hidden)
        positions = find_labelled_positions(labels)
        logits = self.predictions(hidden.flatten(0, 1)[positions])
        targets = labels.flatten()[positions]
        # not the mean, which would be 0 / 0 without labels
        loss = cross_entropy(to_float32(logits), targets, reduction="sum") / max(1, len(positions))
        return loss, logits if self.training else self.predictions(hidden)

    def get_output_embeddings(self) -> nn.Linear:
        """Return the layer that computes the logits."""
        return self.predictions.decoder

    def set_output_embeddings(self, decoder: nn.Linear) -> None:
        """Replace the layer that computes the logits, as transformers does for another vocabulary."""
        self.predictions.decoder = decoder


class LeanAlbertForPreTraining(LeanAlbertWithMLMHead):
    """The model that run_trainer.py trains: masked LM and sentence order."""

    def __init__(self, config: LeanAlbertConfig):
        super().__init__(config, add_pooling_layer=True)
        # classes: the two segments are in order (0) or swapped (1)
        self.sop_classifier = nn.Sequential(OrderedDict(classifier=nn.Linear(config.hidden_size, 2)))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        sentence_order_label: Tensor | None = None,
    ) -> AlbertForPreTrainingOutput:
        """Return the logits, and the sum of the losses of the labels that are given.

        :param labels: [batch, length] int64, -100: no label. In training, prediction_logits are [labels, vocabulary],
            those of the labels only; otherwise [batch, length, vocabulary]
        :param sentence_order_label: [batch] int64, 1: the two segments are swapped
        """
        outputs = self.albert(input_ids, attention_mask, token_type_ids)
        sop_logits = self.sop_classifier(outputs.pooler_output)
        loss, logits = self.predict(outputs.last_hidden_state, labels)
        if sentence_order_label is not None:
            loss = (0 if loss is None else loss) + cross_entropy(to_float32(sop_logits), sentence_order_label)
        return AlbertForPreTrainingOutput(loss=loss, prediction_logits=logits, sop_logits=sop_logits)


class LeanAlbertForMaskedLM(LeanAlbertWithMLMHead):
    """The model for masked LM only, which also loads folders of LeanAlbertForPreTraining."""

    def __init__(self, config: LeanAlbertConfig):
        super().__init__(config, add_pooling_layer=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> MaskedLMOutput:
        """Return the same as LeanAlbertForPreTraining, without the order of sentences."""
        loss, logits = self.predict(self.albert(input_ids, attention_mask, token_type_ids).last_hidden_state, labels)
        return MaskedLMOutput(loss=loss, logits=logits)


class LeanAlbertForSequenceClassification(LeanAlbertPreTrainedModel):
    """The model for a class per text, or a number if config.num_labels is 1."""

    def __init__(self, config: LeanAlbertConfig):
        super().__init__(config)
        self.albert = LeanAlbertModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Return the logits, [batch, labels], and the loss if there are labels.

        :param labels: [batch] int64 classes or float numbers, see config.problem_type
        """
        logits = self.classifier(self.dropout(self.albert(input_ids, attention_mask, token_type_ids).pooler_output))
        # transformers chooses the loss by the name of the class
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)


AUTO_CLASSES = {
    "AutoModel": LeanAlbertModel,
    "AutoModelForPreTraining": LeanAlbertForPreTraining,
    "AutoModelForMaskedLM": LeanAlbertForMaskedLM,
    "AutoModelForSequenceClassification": LeanAlbertForSequenceClassification,
}
transformers.AutoConfig.register(LeanAlbertConfig.model_type, LeanAlbertConfig, exist_ok=True)
LeanAlbertConfig.register_for_auto_class()
for auto_class, model_class in AUTO_CLASSES.items():
    getattr(transformers, auto_class).register(LeanAlbertConfig, model_class, exist_ok=True)
    model_class.register_for_auto_class(auto_class)
