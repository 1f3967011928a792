"""An optimizer: SGD with momentum and decoupled weight decay. It keeps one number for each element."""

from argosy import extend


@extend.optimizer("sgd", moments=("momentum",))
def sgd(update: extend.Update) -> None:
    momentum = update.moments["momentum"]
    momentum.mul_(update.settings["momentum"]).add_(update.gradient)
    update.weight.mul_(1 - update.lr * update.weight_decay).sub_(momentum, alpha=update.lr)
