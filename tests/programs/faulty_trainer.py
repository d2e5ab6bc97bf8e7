"""run_trainer.py with a fault in the model: the output of every fifth forward pass is NaN, a bad machine's work."""

import run_trainer

make_model, passes = run_trainer.make_trained_model, 0


def make_faulty_model(*args):
    model = make_model(*args)

    def spoil(module, inputs, output):
        global passes
        passes += 1
        return output * float("nan") if passes % 5 == 0 else output

    model.predictions.register_forward_hook(spoil)
    return model


run_trainer.make_trained_model = make_faulty_model
with run_trainer.clean_end():
    run_trainer.main(*run_trainer.parse_arguments(*run_trainer.GROUPS))
