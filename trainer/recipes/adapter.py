"""Define `[lora]` and `[publish]`: an adapter's shape, and when a version of it may serve."""

from typing import Final

from pydantic import Field, model_validator

from trainer.recipes.options import Count, Positive, RecipeOptions

# The layers are chosen by the model's architecture.
AUTO: Final = "auto"


class LoraOptions(RecipeOptions):
    """Set `[lora]`: the adapter's shape."""

    rank: Count = Field(
        default=16, description="LoRA rank; not above the model server's --max-lora-rank."
    )
    alpha: Positive = Field(default=32.0, description="LoRA scale: updates count alpha / rank.")
    target_modules: str | list[str] = Field(
        default=AUTO,
        description="Layers with an adapter, as PEFT names them. "
        '"auto" chooses by the architecture: every linear layer but the LM head, and of a mixture '
        "of experts neither the routers nor the experts.",
    )
    experts: bool = Field(
        default=False,
        description='Whether "auto" chooses the experts of a mixture as well. '
        "Few model servers serve adapters of experts.",
    )

    @model_validator(mode="after")
    def _experts_are_chosen_or_named(self) -> "LoraOptions":
        """Refuse `experts` where layers are named: nothing is chosen then."""
        if self.experts and self.target_modules != AUTO:
            raise ValueError(
                f"lora.experts works with lora.target_modules = {AUTO!r} alone: leave one of them"
                " out"
            )
        return self


class PublishOptions(RecipeOptions):
    """Set `[publish]`: when a version passes the probe, and when one is retired."""

    tolerance: Positive = Field(
        default=0.15,
        description="Largest mean |served − trainer| log-probability of the probe's tokens, in "
        "nats. It is about 0.001 between float32 and float32, 0.05 if the server computes in bf16.",
    )
    probe_rows: Count = Field(
        default=4, description="Texts that the probe uses: at most the four that come with Pawl."
    )
    retire_after_s: Positive = Field(
        default=900.0,
        description="A version that lost the traffic is retired after this long without a call.",
    )
    longest_pin_s: Positive = Field(
        default=3600.0,
        description="Where all adapter slots of the model server are taken, a version that lost "
        "the traffic this long ago is retired for the next; its episodes go on with the version "
        "that serves.",
    )
    wait_for_others_s: Positive = Field(
        default=600.0,
        description="A version of a policy with publish_with waits this long for those of the "
        "others; then it goes live without them.",
    )
